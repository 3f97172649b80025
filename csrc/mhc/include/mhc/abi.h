/* The C interface of the native backend: everything that crosses the border of the shared library.
 *
 * Tensors are borrowed: pointers to little-endian FP32 or BF16 elements, token-major, contiguous but for the distance
 * between two rows where a struct mhc_rows says so. Outputs must not overlap inputs. Nothing is kept after a call.
 * No result depends on the instruction set, the thread count, the alignment or the caller's floating-point mode; so an
 * eps is a double, which becomes FP32 under the library's own mode.
 *
 * T tokens, D hidden, K = 4 D, N = 24 controller outputs (PRE 4, POST 4, COMB 16). Every function returns an mhc_status.
 */
#ifndef MHC_ABI_H_
#define MHC_ABI_H_

#include <stdint.h>

#if defined(__GNUC__)
#define MHC_EXPORT __attribute__((visibility("default")))
#else
#define MHC_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define MHC_ABI_VERSION 3

enum mhc_status { MHC_OK = 0, MHC_WRONG_VERSION = 1, MHC_NO_SUCH_ISA = 2, MHC_BAD_ARGUMENT = 3, MHC_NO_MEMORY = 4 };
enum mhc_dtype { MHC_FP32 = 0, MHC_BF16 = 1 };
enum mhc_isa { MHC_BASELINE = 0, MHC_AVX2 = 1, MHC_AVX512 = 2, MHC_NEON = 3, MHC_ISA_COUNT = 4 };
enum mhc_function { MHC_EXP = 0, MHC_SIGMOID = 1, MHC_RSQRT = 2, MHC_SQRT = 3 };

/* How to run. threads: at most so many, the caller's own among them. */
struct mhc_call {
  int32_t version; /* MHC_ABI_VERSION */
  int32_t isa;
  int32_t threads;
  int32_t reserved; /* 0 */
};

/* A matrix whose rows are contiguous: element (t, i) is data[t * stride + i]. */
struct mhc_rows {
  const void* data;
  int64_t stride; /* in elements */
  int64_t dtype;
};

MHC_EXPORT int32_t mhc_abi_version(void);
/* 1 where this build has the level and this processor runs it. */
MHC_EXPORT int32_t mhc_isa_available(int32_t isa);
/* Set the calling thread to round-to-nearest with subnormals kept; returns the mode that mhc_float_mode_restore takes. */
MHC_EXPORT uint64_t mhc_float_mode_default(void);
MHC_EXPORT void mhc_float_mode_restore(uint64_t mode);

/* The functions of portable-fp32-mhc-v1, element by element: y[i] = f(x[i]). */
MHC_EXPORT int32_t mhc_elementary(const struct mhc_call*, int32_t function, int64_t count, const float* x, float* y);

/* hc_split_sinkhorn. The forward has two halves; sigmoid(h[:, 0:8]) and exp(shifted) come from the caller's profile.
 * shifted[T, 16] = COMB - its row maximum. sig[T, 8], exps[T, 16] -> pre[T, 4], post[T, 4], c[T, 16], softmax[T, 16]. */
MHC_EXPORT int32_t mhc_split_shift(const struct mhc_call*, int64_t tokens, const float* h, float* shifted);
MHC_EXPORT int32_t mhc_split_fwd(const struct mhc_call*, int64_t tokens, const float* sig, const float* exps, float* pre,
                                 float* post, float* c, float* softmax);
MHC_EXPORT int32_t mhc_split_bwd(const struct mhc_call*, int64_t tokens, const float* dpre, const float* dpost,
                                 const float* dc, struct mhc_rows sig_pre, struct mhc_rows sig_post,
                                 const float* softmax, float* dh);

/* fixed_k_gemm, and the two folds of fp32_gemm_rms: out[M, N] = fold_k x w; sumsq[M] = fold_k x x, or NULL. */
MHC_EXPORT int32_t mhc_fold_k(const struct mhc_call*, int64_t m, int64_t n, int64_t k, struct mhc_rows x,
                              struct mhc_rows w, float* out, float* sumsq);
/* dx[M, K] = fold_n dy w. */
MHC_EXPORT int32_t mhc_fold_n(const struct mhc_call*, int64_t m, int64_t n, int64_t k, struct mhc_rows dy,
                              struct mhc_rows w, float* dx);
/* dw[N, K] = fold_m dy x. */
MHC_EXPORT int32_t mhc_fold_m(const struct mhc_call*, int64_t m, int64_t n, int64_t k, struct mhc_rows dy,
                              struct mhc_rows x, float* dw);
/* The scale of a row under rsqrt-mean-plus-eps: mean = s / K + eps; r = rsqrt(mean) comes from the caller's profile. */
MHC_EXPORT int32_t mhc_gemm_rms_mean(const struct mhc_call*, int64_t tokens, int64_t k, double eps, const float* s,
                                     float* mean);
/* Under inverse-rms-plus-eps: norm = sqrt(s), from the caller's profile -> q = norm / sqrt(K), r = 1 / (q + eps). */
MHC_EXPORT int32_t mhc_gemm_rms_scale(const struct mhc_call*, int64_t tokens, int64_t k, double eps, const float* norm,
                                      float* q, float* r);
/* dx[T, K] = fold_n dp w + the RMS leg; dw[24, K] = fold_t dp x, or NULL. q is NULL under rsqrt-mean-plus-eps. */
MHC_EXPORT int32_t mhc_gemm_rms_bwd(const struct mhc_call*, int64_t tokens, int64_t k, const float* dp, const float* dr,
                                    struct mhc_rows x, struct mhc_rows weight, const float* q, const float* r,
                                    float* dx, float* dw);

/* r_old and dr_new: rows of 4 D elements, [4, D] contiguous. r_new is BF16 [T, 4, D]; hidden BF16 [T, D]. */
MHC_EXPORT int32_t mhc_post_fwd(const struct mhc_call*, int64_t tokens, int64_t hidden, struct mhc_rows r_old,
                                struct mhc_rows y, const float* c, const float* post, uint16_t* r_new);
/* dr_old may be NULL; dy is [T, D] of dy_dtype, rounded to it once. */
MHC_EXPORT int32_t mhc_post_bwd(const struct mhc_call*, int64_t tokens, int64_t hidden, struct mhc_rows dr_new,
                                struct mhc_rows r_old, struct mhc_rows y, const float* c, const float* post,
                                float* dr_old, void* dy, int64_t dy_dtype, float* dc, float* dpost);
MHC_EXPORT int32_t mhc_aggregate_fwd(const struct mhc_call*, int64_t tokens, int64_t hidden, const float* pre,
                                     struct mhc_rows r_old, uint16_t* out);
MHC_EXPORT int32_t mhc_aggregate_bwd(const struct mhc_call*, int64_t tokens, int64_t hidden, struct mhc_rows dh,
                                     const float* pre, struct mhc_rows r_old, float* dr_old, float* dpre);

/* rmsnorm_residual. mean[T] = fold_d(x x) / D + eps; r = rsqrt(mean) comes from the caller's profile. */
MHC_EXPORT int32_t mhc_rmsnorm_mean(const struct mhc_call*, int64_t tokens, int64_t hidden, struct mhc_rows x,
                                    double eps, float* mean);
MHC_EXPORT int32_t mhc_rmsnorm_fwd(const struct mhc_call*, int64_t tokens, int64_t hidden, struct mhc_rows x,
                                   struct mhc_rows gamma, const float* r, uint16_t* y, uint16_t* residual);
MHC_EXPORT int32_t mhc_rmsnorm_bwd(const struct mhc_call*, int64_t tokens, int64_t hidden, struct mhc_rows dy,
                                   struct mhc_rows d_residual, struct mhc_rows x, struct mhc_rows gamma, const float* r,
                                   float* dx, float* dgamma);

/* The whole block. Forward stages, in order; those from `first` to `last` run in one call:
 *   0  r_old, weight -> p, s                                  | then norm = sqrt(s)
 *   1  norm -> q, r, h, shifted                               | then sig = sigmoid(h[:, 0:8]), exps = exp(shifted)
 *   2  sig, exps -> softmax, pre, post, c, hidden, mean, r_new | then inv_rms = rsqrt(mean)
 *   3  inv_rms -> normalized, residual
 * What stands after the bar is the caller's between two calls (portable == 0), or the library's own (portable == 1; then
 * norm, sig, exps and inv_rms are outputs). With q NULL the scale is that of rsqrt-mean-plus-eps: stage 0 leaves
 * norm = s / K + eps, then r = rsqrt(norm), and stage 1 takes r. Every field is eight bytes wide. */
struct mhc_block_forward_args {
  int64_t tokens, hidden;
  int64_t first, last, portable;
  double mhc_eps, rmsnorm_eps;
  struct mhc_rows r_old;     /* BF16, rows [4, D] */
  struct mhc_rows y;         /* BF16; unused where r_new is NULL */
  struct mhc_rows gamma;     /* one row; unused where normalized is NULL */
  const float *weight, *alpha_pre, *alpha_post, *alpha_res, *bias;
  float *p, *s, *norm, *q, *r, *h;
  float *sig, *exps; /* exps[T, 16] holds `shifted` after stage 1; exp is taken in place. softmax may be the same memory */
  float *softmax, *pre, *post, *c;
  float *mean, *inv_rms;
  uint16_t *hidden_out, *normalized, *residual, *r_new; /* normalized, residual together, or r_new, may be NULL */
};
MHC_EXPORT int32_t mhc_block_forward(const struct mhc_call*, const struct mhc_block_forward_args*);

/* How much of post a backward holds. */
enum mhc_post_part {
  MHC_NO_POST = 0,   /* d_post and d_c are inputs */
  MHC_POST = 1,      /* d_post, d_c and dy are outputs */
  MHC_POST_LEG = 2   /* d_post and d_c are inputs; d_r_old has the leg of d_r_new, which takes c alone */
};

/* q is NULL under rsqrt-mean-plus-eps. Without with_norm the norm is left out and d_hidden_in is the input that d_hidden
 * would be. d_weight and the four that follow may be NULL together (mixer-frozen). streams_dtype is that of d_r_old and
 * dy: summed in FP32, rounded to it once. Where hidden_again is not NULL, hidden is made there anew from pre and r_old,
 * and hidden_saved is not read. */
struct mhc_block_backward_args {
  int64_t tokens, hidden;
  int64_t post_part, with_norm, streams_dtype;
  struct mhc_rows r_old, y, gamma;
  struct mhc_rows d_r_new, d_normalized, d_residual, d_hidden_in;
  struct mhc_rows hidden_saved; /* BF16 */
  const float *weight, *alpha_pre, *alpha_post, *alpha_res;
  const float *p, *q, *r, *softmax, *pre, *post, *c, *inv_rms;
  struct mhc_rows sig_pre, sig_post;
  uint16_t* hidden_again; /* [T, D] */
  void *d_r_old, *dy;
  float *d_hidden, *d_gamma, *d_c, *d_post;
  float *d_weight, *d_alpha_pre, *d_alpha_post, *d_alpha_res, *d_bias;
};
MHC_EXPORT int32_t mhc_block_backward(const struct mhc_call*, const struct mhc_block_backward_args*);

/* For the roofline: `steps` dependent FP32 additions; multiply-adds on independent registers, whose count of operations
 * per thread is returned; and a copy of `bytes` bytes over the threads of the call. */
MHC_EXPORT float mhc_probe_add_chain(int64_t steps);
MHC_EXPORT int64_t mhc_probe_multiply_add(const struct mhc_call*, int64_t steps);
MHC_EXPORT int32_t mhc_probe_copy(const struct mhc_call*, int64_t bytes, const void* source, void* target);

#ifdef __cplusplus
}
#endif

#endif /* MHC_ABI_H_ */
