// What the kernels share: sums of bfloat16 products in float32. See skinny_gemm.py.
#include <immintrin.h>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using Bits = uint16_t;  // of a bfloat16
constexpr int STEP = 32;  // products at a time
constexpr int WIDE = 4;   // rows of either side in a block
constexpr int TILE = 16;  // rows of a tile, and numbers of 4 bytes in one

// The lower half of each 32 bits is one number, the upper half the next one.
inline __m512 lower(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 upper(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}

// 16 numbers as float32, in their order.
inline __m512 float_of(const Bits* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}

inline __m512 halves(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }

inline __m512 quarters(__m512 a, __m512 b) {
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}

inline __m512 lanes(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Number i of the result is the sum over v[i].
inline __m512 sums(const __m512 (&v)[16]) {
  const __m512 a = quarters(halves(v[0], v[1]), halves(v[2], v[3]));
  const __m512 b = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
  const __m512 c = quarters(halves(v[8], v[9]), halves(v[10], v[11]));
  const __m512 d = quarters(halves(v[12], v[13]), halves(v[14], v[15]));
  return lanes(lanes(a, b), lanes(c, d));
}

inline __m256i rounded(__m512 sum) {  // to the nearest, ties to even; NaN stays NaN
  const __m512i bits = _mm512_castps_si512(sum);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(_mm512_srli_epi32(up, 16), nan, 0x7fc0));
}

// M rows of the left side, spread by `spread`, times N rows of the right side: number m * WIDE + n of the result. The
// order in which products are added is the same for every M, so a row's result does not depend on the rows beside it.
// AHEAD: the right side comes from far, so the next block is fetched meanwhile.
template <int M, int N, bool AHEAD>
inline __m512 products(const float* left, const Bits* right, int64_t width) {
  __m512 sum[WIDE * WIDE];
#pragma GCC unroll 16
  for (int i = 0; i < WIDE * WIDE; i++) sum[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < width; k += STEP) {
    __m512 even[N], odd[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const Bits* at = right + n * width + k;
      if constexpr (AHEAD) _mm_prefetch(reinterpret_cast<const char*>(at + WIDE * width), _MM_HINT_T0);
      const __m512i pairs = _mm512_loadu_si512(at);
      even[n] = lower(pairs);
      odd[n] = upper(pairs);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const float* at = left + k * M + m * STEP;
      const __m512 first = _mm512_load_ps(at), second = _mm512_load_ps(at + STEP / 2);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m * WIDE + n] = _mm512_fmadd_ps(even[n], first, sum[m * WIDE + n]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m * WIDE + n] = _mm512_fmadd_ps(odd[n], second, sum[m * WIDE + n]);
    }
  }
  return sums(sum);
}

// M rows as float32: those of a block step by step, and of each step first the even numbers, then the odd ones.
void spread(const Bits* left, float* to, int64_t M, int64_t width) {
  for (int64_t m = 0; m < M; m++)
    for (int64_t k = 0; k < width; k += STEP) {
      const __m512i pairs = _mm512_loadu_si512(left + m * width + k);
      _mm512_store_ps(to + k * M + m * STEP, lower(pairs));
      _mm512_store_ps(to + k * M + m * STEP + STEP / 2, upper(pairs));
    }
}

// 16 rows of 16 numbers of 4 bytes; number i of row j becomes number j of row i.
inline void transpose(__m512i (&v)[16]) {
  __m512i w[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    w[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    w[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    w[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    w[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(w[i], w[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(w[i + 4], w[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(w[i + 4], w[i + 12], 0xdd);
  }
}

#ifdef SELFSPEC_TILES

struct alignas(64) Config {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const Config config;

void begin_tiles() { asm volatile("ldtilecfg %0" ::"m"(config)); }
void end_tiles() { _tile_release(); }

// Lays out 16 rows as right-hand tiles: [width / 32, 16 pairs of inputs, 16 rows, 2]. Rows from `count` on are zero.
void spread_tiles(const Bits* left, Bits* to, int64_t count, int64_t width) {
  for (int64_t k = 0; k < width; k += STEP, to += TILE * STEP) {
    __m512i rows[TILE];
#pragma GCC unroll 16
    for (int m = 0; m < TILE; m++)
      rows[m] = m < count ? _mm512_loadu_si512(left + m * width + k) : _mm512_setzero_si512();
    transpose(rows);
#pragma GCC unroll 16
    for (int p = 0; p < TILE; p++) _mm512_store_si512(to + p * STEP, rows[p]);
  }
}

// 16 outputs of G groups of 16 rows, into sums [G, outputs, rows]. A tile adds up each number on its own, in the order
// of the inputs: a row's bits depend neither on the rows beside it nor on G. Meanwhile the 16 outputs after the next ones
// are fetched.
template <int G>
void tiles(const Bits* left, const Bits* weight, float* sums, int64_t width, bool ahead) {
  asm volatile("" ::: "memory");  // the intrinsics do not say what they read
  _tile_zero(0);
  if constexpr (G > 1) _tile_zero(1);
  if constexpr (G > 2) _tile_zero(2);
  if constexpr (G > 3) _tile_zero(3);
  const char* next = reinterpret_cast<const char*>(weight + 2 * TILE * width);
  for (int64_t k = 0; k < width; k += STEP, left += TILE * STEP) {
    if (ahead)
#pragma GCC unroll 16
      for (int line = 0; line < 16; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    _tile_loadd(4, weight + k, 2 * width);
    _tile_loadd(5, left, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (G > 1) {
      _tile_loadd(6, left + TILE * width, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (G > 2) {
      _tile_loadd(7, left + 2 * TILE * width, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (G > 3) {
      _tile_loadd(5, left + 3 * TILE * width, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (G > 1) _tile_stored(1, sums + 256, 64);
  if constexpr (G > 2) _tile_stored(2, sums + 512, 64);
  if constexpr (G > 3) _tile_stored(3, sums + 768, 64);
  asm volatile("" ::: "memory");
}

#endif

// Numbers to write to, at the start of a cache line.
struct Scratch {
  std::vector<float> held;
  float* of(size_t count) {
    if (held.size() < count + 16) held.resize(count + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(held.data()) + 63) / 64 * 64);
  }
};

}  // namespace
