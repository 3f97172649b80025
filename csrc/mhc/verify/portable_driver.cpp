// Run the cases of a case file and write what they give.
//
//   portable_driver CASES RESULTS [--stride N] [--isa NAME]
//   portable_driver --isas
//
// Kinds: "block" and "block-mixer-frozen" (forward and backward; the second leaves the controller gradients out), each
// also with "-rsqrt-mean" (controller_rms), "hc_split_sinkhorn", "rmsnorm_residual". The results of a case bear the names of the golden manifest. With --stride,
// print a checksum of each elementary function over every N-th FP32 input, in the manner of verify_elementary. Which
// implementation runs is decided by what this file is linked with (portable_backend.hpp); --isa chooses one of its levels
// of instructions, --isas lists them, a line each.
// Exit status: 0, or 2 where an argument, a file or a case is bad.
#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checksum.hpp"
#include "portable_backend.hpp"
#include "portable_block.hpp"
#include "portable_case_file.hpp"

namespace mhc::portable {

namespace {

constexpr std::string_view kRsqrtMean = "-rsqrt-mean";

Sizes sizes_of(const Case& input, const std::string& tensor, std::size_t rank) {
  const Shape& shape = input.get(tensor).shape;
  if (shape.size() != rank || shape.back() == 0) {
    throw CaseError(input.name + ": " + tensor + ": want rank " + std::to_string(rank) + " and D of at least 1");
  }
  return {shape.front(), shape.back()};
}

Floats gamma_of(const Case& input, std::size_t hidden) {
  if (!input.get("gamma").is_bf16) return input.floats("gamma", {hidden});
  Floats gamma;
  for (const Bf16 value : input.bf16s("gamma", {hidden})) gamma.push_back(widen(value));
  return gamma;
}

Batch batch_of(const Case& input) {
  const Sizes sizes = sizes_of(input, "r_old", 3);
  return {sizes,
          input.kind.ends_with(kRsqrtMean) ? ControllerRms::kRsqrtMeanPlusEps : ControllerRms::kInverseRmsPlusEps,
          input.bf16s("r_old", {sizes.tokens, kStreams, sizes.hidden}),
          input.bf16s("y_sublayer", {sizes.tokens, sizes.hidden}),
          input.floats("weight", {kControllerN, sizes.flat_k()}),
          input.floats("alpha_pre", {1})[0],
          input.floats("alpha_post", {1})[0],
          input.floats("alpha_res", {1})[0],
          input.floats("bias", {kControllerN}),
          gamma_of(input, sizes.hidden)};
}

void add_forward(Case& out, const Batch& batch, const Forward& forward) {
  const std::size_t t = batch.sizes.tokens, d = batch.sizes.hidden;
  const PreForward& pre = forward.pre;
  out.add("controller.p", {t, kControllerN}, pre.gemm.p);
  out.add("controller.r", {t}, pre.gemm.r);
  out.add("controller.h", {t, kControllerN}, pre.h);
  out.add("split.pre", {t, kStreams}, pre.split.pre);
  out.add("split.post", {t, kStreams}, pre.split.post);
  out.add("split.c", {t, kStreams, kStreams}, pre.split.c);
  out.add("pre.hidden", {t, d}, pre.hidden);
  out.add("norm.normalized", {t, d}, forward.norm.y);
  out.add("norm.residual", {t, d}, pre.hidden);
  out.add("post.r_new", {t, kStreams, d}, forward.r_new);
  out.add("r_new", {t, kStreams, d}, forward.r_new);
}

Floats stream(const Floats& d_r_old, std::size_t index, Sizes sizes) {
  Floats result;
  for (std::size_t t = 0; t < sizes.tokens; ++t) {
    for (std::size_t d = 0; d < sizes.hidden; ++d) result.push_back(d_r_old[(t * kStreams + index) * sizes.hidden + d]);
  }
  return result;
}

void add_backward(Case& out, const Batch& batch, const Backward& grads, bool controller) {
  const std::size_t t = batch.sizes.tokens, d = batch.sizes.hidden;
  for (const std::string prefix : {"bwd.", "grad."}) {
    out.add(prefix + "dy_sublayer", {t, d}, grads.dy_sublayer);
    out.add(prefix + "d_c", {t, kStreams, kStreams}, grads.d_c);
    out.add(prefix + "d_post", {t, kStreams}, grads.d_post);
    out.add(prefix + "d_hidden", {t, d}, grads.d_hidden);
    out.add(prefix + "d_gamma", {d}, grads.d_gamma);
    out.add(prefix + "d_r_old", {t, kStreams, d}, grads.pre.d_r_old);
  }
  for (std::size_t i = 0; i < kStreams; ++i) {
    out.add("bwd.d_stream" + std::to_string(i), {t, d}, stream(grads.pre.d_r_old, i, batch.sizes));
  }
  if (!controller) return;
  out.add("grad.d_controller_weight", {kControllerN, batch.sizes.flat_k()}, grads.pre.d_weight);
  out.add("grad.d_alpha_pre", {1}, Floats{grads.pre.d_alpha_pre});
  out.add("grad.d_alpha_post", {1}, Floats{grads.pre.d_alpha_post});
  out.add("grad.d_alpha_res", {1}, Floats{grads.pre.d_alpha_res});
  out.add("grad.d_bias", {kControllerN}, grads.pre.d_bias);
}

void run_block(const Case& input, Case& out, bool controller) {
  const Batch batch = batch_of(input);
  const std::size_t t = batch.sizes.tokens, d = batch.sizes.hidden;
  const ArrivingGrads arriving{input.bf16s("d_r_new", {t, kStreams, d}), input.bf16s("d_normalized", {t, d}),
                               input.bf16s("d_residual", {t, d})};
  const Forward forward = block_forward(batch);
  add_forward(out, batch, forward);
  add_backward(out, batch, block_backward(batch, forward, arriving), controller);
}

void run_sinkhorn(const Case& input, Case& out) {
  const std::size_t t = sizes_of(input, "h", 2).tokens;
  const Split split = split_sinkhorn_fwd(input.floats("h", {t, kControllerN}));
  const Floats& dpre = input.floats("dpre", {t, kStreams});
  const Floats& dpost = input.floats("dpost", {t, kStreams});
  const Floats& dc = input.floats("dc", {t, kStreams, kStreams});
  out.add("pre", {t, kStreams}, split.pre);
  out.add("post", {t, kStreams}, split.post);
  out.add("c", {t, kStreams, kStreams}, split.c);
  out.add("grad.dh", {t, kControllerN}, split_sinkhorn_bwd(dpre, dpost, dc, split.saved));
}

void run_rmsnorm(const Case& input, Case& out) {
  const Sizes sizes = sizes_of(input, "x", 2);
  const Shape rows{sizes.tokens, sizes.hidden};
  const Bf16s& x = input.bf16s("x", rows);
  const Floats gamma = gamma_of(input, sizes.hidden);
  const Norm norm = rmsnorm_fwd(x, gamma, sizes);
  NormGrads grads = rmsnorm_bwd(input.bf16s("dy", rows), input.bf16s("d_residual", rows), x, gamma, norm.r, sizes);
  out.add("y", rows, norm.y);
  out.add("residual", rows, x);
  out.add("grad.dx", rows, std::move(grads.dx));
  out.add("grad.dgamma", {sizes.hidden}, std::move(grads.dgamma));
}

Case run(const Case& input) {
  Case out{input.kind, input.name, {}};
  std::string block = input.kind;
  if (block.ends_with(kRsqrtMean)) block.resize(block.size() - kRsqrtMean.size());
  if (block == "block" || block == "block-mixer-frozen") {
    run_block(input, out, block == "block");
  } else if (input.kind == "hc_split_sinkhorn") {
    run_sinkhorn(input, out);
  } else if (input.kind == "rmsnorm_residual") {
    run_rmsnorm(input, out);
  } else {
    throw CaseError(input.name + ": unknown kind '" + input.kind + "'");
  }
  return out;
}

void print_checksum(const char* name, Function function, std::uint64_t stride) {
  constexpr std::uint64_t kEnd = std::uint64_t{1} << 32;
  constexpr std::size_t kPiece = 1 << 16;
  std::uint64_t count = 0, checksum = 0;
  Floats x, y;
  for (std::uint64_t i = 0; i < kEnd;) {
    x.clear();
    for (; i < kEnd && x.size() < kPiece; i += stride) x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(i)));
    y.resize(x.size());
    elementary(function, x, y);
    for (std::size_t at = 0; at < x.size(); ++at) {
      checksum += mix(std::bit_cast<std::uint32_t>(x[at]), std::bit_cast<std::uint32_t>(y[at]));
    }
    count += x.size();
  }
  std::printf("%-8s inputs %10" PRIu64 "  checksum %016" PRIx64 "\n", name, count, checksum);
}

std::uint64_t stride_of(const std::string& text) {
  char* end = nullptr;
  const std::uint64_t stride = std::strtoull(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || text[0] < '0' || text[0] > '9' || stride == 0) {
    throw CaseError("--stride: got '" + text + "', want a number of at least 1");
  }
  return stride;
}

void choose(const std::string& level) {
  const std::vector<std::string> known = levels();
  if (std::find(known.begin(), known.end(), level) != known.end()) return choose_level(level);
  std::string names;
  for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
  throw CaseError("--isa: got '" + level + "', want one of: " + (names.empty() ? "(none)" : names));
}

struct Arguments {
  std::vector<std::string> files;
  std::uint64_t stride = 0;
};

Arguments parse(const std::vector<std::string>& arguments) {
  Arguments parsed;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool last = i + 1 == arguments.size();
    if (arguments[i] == "--stride" && !last) {
      parsed.stride = stride_of(arguments[++i]);
    } else if (arguments[i] == "--isa" && !last) {
      choose(arguments[++i]);
    } else {
      parsed.files.push_back(arguments[i]);
    }
  }
  if (parsed.files.size() != 2) {
    throw CaseError("usage: " + std::string(kProgram) + " CASES RESULTS [--stride N] [--isa NAME], or --isas alone");
  }
  return parsed;
}

void drive(const std::vector<std::string>& arguments) {
  if (arguments.size() == 1 && arguments[0] == "--isas") {
    for (const std::string& level : levels()) std::puts(level.c_str());
    return;
  }
  const Arguments parsed = parse(arguments);
  std::vector<Case> results;
  for (const Case& input : read_cases(parsed.files[0])) results.push_back(run(input));
  write_cases(parsed.files[1], results);
  if (parsed.stride == 0) return;
  print_checksum("exp", Function::kExp, parsed.stride);
  print_checksum("rsqrt", Function::kRsqrt, parsed.stride);
  print_checksum("sqrt", Function::kSqrt, parsed.stride);
  print_checksum("sigmoid", Function::kSigmoid, parsed.stride);
}

}  // namespace

}  // namespace mhc::portable

int main(int argc, char** argv) {
  try {
    mhc::portable::drive({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", mhc::portable::kProgram, error.what());
    return 2;
  }
  return 0;
}
