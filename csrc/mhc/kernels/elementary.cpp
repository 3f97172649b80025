// The elementary functions of portable-fp32-mhc-v1, a vector at a time: the correctly rounded values of elementary.hpp's
// scalar code, which is the one that is proved on all inputs; a test holds this one against it.
#include "mhc/exp_table.hpp"
#include "rows.hpp"

namespace mhc::MHC_LEVEL {

namespace {

typedef Vectors<kLanes>::D F64;
typedef Vectors<kLanes>::L I64;

MHC_INLINE F64 either(I64 mask, F64 yes, F64 no) {
  return bits_as<F64>((bits_as<I64>(yes) & mask) | (bits_as<I64>(no) & ~mask));
}

MHC_INLINE F32 quiet(F32 value) { return select(bits_as<U32>(value == value), value, bits_as<F32>(U32{} + 0x7fc00000u)); }

// hi + lo (hi > 0) rounded to odd at 53 bits, then to FP32.
MHC_INLINE F32 round_once(F64 hi, F64 lo) {
  const I64 bits = bits_as<I64>(hi);
  const I64 below = lo < 0.0, exact = lo == 0.0;
  const I64 odd = (bits + below) | 1;
  return __builtin_convertvector(bits_as<F64>((bits & exact) | (odd & ~exact)), F32);
}

MHC_INLINE F32 exp_of(F32 value) {
  const F64 wide = __builtin_convertvector(value, F64);
  const F64 low = F64{} - 104.0, high = F64{} + 89.0;
  F64 x = either(wide < low, low, either(wide > high, high, wide));
  x = either(wide == wide, x, F64{});
  // The nearest integer, by an addition whose sum has no room for a fraction.
  constexpr double kRound = 0x1.8p52;
  const F64 shifted = x * 0x1.71547652b82fep+7 + kRound;
  const F64 steps = shifted - kRound;
  const I64 k = bits_as<I64>(shifted) - bits_as<I64>(F64{} + kRound);
  const F64 a = x - steps * 0x1.62e42fefa0000p-8;
  const F64 b = steps * -0x1.cf79abc9e3b3ap-47;
  const F64 r = a + b;
  const F64 shadow = r - a;
  const F64 r_low = (a - (r - shadow)) + (b - shadow);
  const F64 series = 1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720));
  const F64 tail = r_low + (r * r) * (0.5 + r * (1.0 / 6 + r * series));
  F64 table_high, table_low;
  for (int i = 0; i < kLanes; ++i) {
    const ExpEntry& entry = kExpTable[k[i] & 127];
    table_high[i] = entry.high;
    table_low[i] = entry.low;
  }
  const F64 rest = table_high * r + (table_high * tail + (table_low + table_low * r));
  const F64 hi = table_high + rest;
  const F64 lo = rest - (hi - table_high);
  const F64 scale = bits_as<F64>(((k >> 7) + 1023) << 52);
  return quiet(select(bits_as<U32>(value == value), round_once(hi * scale, lo * scale), value));
}

template <typename V>
MHC_INLINE V root(V value) {
  constexpr int n = static_cast<int>(sizeof(V) / sizeof(value[0]));
  for (int i = 0; i < n; ++i) value[i] = sizeof(value[0]) == 8 ? __builtin_sqrt(value[i]) : __builtin_sqrtf(value[i]);
  return value;
}

MHC_INLINE F32 sqrt_of(F32 value) { return quiet(root(value)); }

MHC_INLINE F32 rsqrt_of(F32 value) {
  const F32 zero{}, infinite = splat(__builtin_inff());
  const U32 ordinary = bits_as<U32>(value > zero) & bits_as<U32>(value < infinite);
  const F64 x = __builtin_convertvector(select(ordinary, value, splat(1.0f)), F64);
  const F64 y = __builtin_convertvector(__builtin_convertvector(1.0 / root(x), F32), F64);
  const F64 square = y * y;
  const F64 high = bits_as<F64>(bits_as<I64>(square) & -(std::int64_t{1} << 29));
  const F64 residual = (1.0 - x * high) - x * (square - high);
  const F64 correction = y * (residual * 0.5 + (residual * residual) * 0.375);
  const F64 hi = y + correction;
  const F32 result = round_once(hi, correction - (hi - y));
  const U32 sign = bits_as<U32>(value) & 0x80000000u;
  const F32 at_zero = bits_as<F32>(bits_as<U32>(infinite) | sign);
  const F32 special = select(bits_as<U32>(value == zero), at_zero,
                             select(bits_as<U32>(value == infinite), zero, bits_as<F32>(U32{} + 0x7fc00000u)));
  return select(ordinary, result, special);
}

MHC_INLINE F32 sigmoid_of(F32 value) { return quiet(splat(1.0f) / (splat(1.0f) + exp_of(-value))); }

template <typename Function>
MHC_INLINE void each(std::int64_t count, const float* x, float* y, Function function) {
  for_lanes(0, count, [&](std::int64_t at, auto some) { store(y + at, function(load(x + at, some)), some); });
}

}  // namespace

void elementary(std::int32_t function, std::int64_t count, const float* x, float* y) {
  switch (function) {
    case MHC_EXP: return each(count, x, y, [](F32 v) { return exp_of(v); });
    case MHC_SIGMOID: return each(count, x, y, [](F32 v) { return sigmoid_of(v); });
    case MHC_RSQRT: return each(count, x, y, [](F32 v) { return rsqrt_of(v); });
    default: return each(count, x, y, [](F32 v) { return sqrt_of(v); });
  }
}

void gemm_rms_mean(std::int64_t tokens, std::int64_t k, float eps, const float* s, float* mean) {
  const F32 width = splat(static_cast<float>(k));
  for_lanes(0, tokens, [&](std::int64_t at, auto some) {
    store(mean + at, load(s + at, some) / width + splat(eps), some);
  });
}

void gemm_rms_scale(std::int64_t tokens, std::int64_t k, float eps, const float* norm, float* q, float* r) {
  const F32 root_k = splat(static_cast<float>(__builtin_sqrt(static_cast<double>(k))));
  for_lanes(0, tokens, [&](std::int64_t at, auto some) {
    const F32 scaled = load(norm + at, some) / root_k;
    store(q + at, scaled, some);
    store(r + at, splat(1.0f) / (scaled + splat(eps)), some);
  });
}

}  // namespace mhc::MHC_LEVEL
