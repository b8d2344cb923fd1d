// What the kernels share: sums of bfloat16 products in float32. See skinny_gemm.py and vectors.h, which comes first.
namespace {

constexpr int STEP = 32;  // products at a time
constexpr int WIDE = 4;   // rows of either side in a block
constexpr int TILE = 16;  // rows of a tile, and numbers of 4 bytes in one

#ifdef SELFSPEC_AVX512

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

// M rows of the left side, spread by `spread`, times N rows of the right side: number m * WIDE + n of the result. The
// order in which products are added is the same for every M, so a row's result does not depend on the rows beside it.
// AHEAD: the right side comes from far, so the next block is fetched meanwhile.
template <int M, int N, bool AHEAD>
inline __m512 products(const Left* left, const Bits* right, int64_t width) {
  __m512 sum[WIDE * WIDE];
#pragma GCC unroll 16
  for (int i = 0; i < WIDE * WIDE; i++) sum[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < width; k += STEP) {
    Ints pairs[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const Bits* at = right + n * width + k;
      if constexpr (AHEAD) _mm_prefetch(reinterpret_cast<const char*>(at + WIDE * width), _MM_HINT_T0);
      pairs[n] = pairs_at(at);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const Left* at = left + k * M + m * STEP;
#ifdef SELFSPEC_PAIRS
      const Ints both = pairs_at(at);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m * WIDE + n] = fmadd(pairs[n], both, sum[m * WIDE + n]);
#else
      const __m512 first = _mm512_load_ps(at), second = _mm512_load_ps(at + STEP / 2);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m * WIDE + n] = fmadd(lower(pairs[n]), first, sum[m * WIDE + n]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m * WIDE + n] = fmadd(upper(pairs[n]), second, sum[m * WIDE + n]);
#endif
    }
  }
  return sums(sum);
}

#else

// Number i of the result is the sum over v[i].
inline Floats sums(const __m256 (&v)[16]) {
  __m256 eights[2];
  for (int i = 0; i < 2; i++) {
    const __m256* of = v + 8 * i;
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(of[4], of[5]), _mm256_hadd_ps(of[6], of[7]));
    eights[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  return {eights[0], eights[1]};
}

// As `products`, N rows of the right side from `first` on, so few that the sums fit into registers.
template <int M, int N, bool AHEAD>
inline void partial_products(const float* left, const Bits* right, int64_t width, __m256* to) {
  __m256 sum[M][N];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sum[m][n] = _mm256_setzero_ps();
  for (int64_t k = 0; k < width; k += STEP)
#pragma GCC unroll 2
    for (int half = 0; half < STEP; half += STEP / 2) {
      const float* at = left + k * M + half / 2;
      __m256 even[N], odd[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        const Bits* from = right + n * width + k + half;
        if (AHEAD && half == 0) _mm_prefetch(reinterpret_cast<const char*>(from + WIDE * width), _MM_HINT_T0);
        const __m256i pairs = half_at(from);
        even[n] = lower(pairs);
        odd[n] = upper(pairs);
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; m++, at += STEP) {
        const __m256 first = _mm256_load_ps(at), second = _mm256_load_ps(at + STEP / 2);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[m][n] = _mm256_fmadd_ps(even[n], first, sum[m][n]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[m][n] = _mm256_fmadd_ps(odd[n], second, sum[m][n]);
      }
    }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) to[m * WIDE + n] = sum[m][n];
}

template <int M, int N, bool AHEAD>
inline Floats products(const float* left, const Bits* right, int64_t width) {
  __m256 sum[WIDE * WIDE] = {};
  constexpr int FIRST = M > 2 && N > 2 ? 2 : N;
  partial_products<M, FIRST, AHEAD>(left, right, width, sum);
  if constexpr (FIRST < N) partial_products<M, N - FIRST, AHEAD>(left, right + FIRST * width, width, sum + FIRST);
  return sums(sum);
}

#endif

// M rows: those of a block step by step, and of each step, where they are float32, first the even numbers, then the odd
// ones.
void spread(const Bits* left, Left* to, int64_t M, int64_t width) {
  for (int64_t m = 0; m < M; m++)
    for (int64_t k = 0; k < width; k += STEP) {
      const Bits* from = left + m * width + k;
      Left* at = to + k * M + m * STEP;
#ifdef SELFSPEC_PAIRS
      std::memcpy(at, from, STEP * sizeof(Bits));
#else
      store(at, lower(pairs_at(from)));
      store(at + STEP / 2, upper(pairs_at(from)));
#endif
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

}  // namespace
