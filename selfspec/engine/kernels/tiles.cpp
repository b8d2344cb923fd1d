// out = left weight^T (+ bias) by the tiles of AMX, over weights as they are.
#include <omp.h>

namespace {

constexpr int TILE = 16;                // rows of a tile, and numbers of 4 bytes in one
constexpr int GROUPS = 4;               // groups of 16 rows that are multiplied together
constexpr int64_t SMALL = 1 << 15;      // products that one thread does

struct alignas(64) Config {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const Config config;

struct Place {
  int weight;
  int64_t n, b;
};

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

// Rows as tiles take them: of 16 rows and 32 inputs first the pairs of inputs, then the rows, then the two of a pair.
// Rows behind the last are zero.
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
__attribute__((target("amx-tile,amx-bf16"))) void tiles(const Bits* left, const Bits* weight, float* sums,
                                                         int64_t width, bool ahead) {
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

// Sums of 16 outputs to their places in `count` rows.
void put(const float* sums, const Bits* bias, Bits* out, int64_t count, int64_t stride) {
  __m512i of[TILE];
#pragma GCC unroll 16
  for (int n = 0; n < TILE; n++) of[n] = _mm512_load_si512(sums + n * TILE);
  transpose(of);
  const __m512 more = bias ? float_of(bias) : _mm512_setzero_ps();
#pragma GCC unroll 16
  for (int m = 0; m < TILE; m++)
    if (m < count) {
      const __m512 sum = _mm512_castsi512_ps(of[m]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + m * stride), rounded(bias ? _mm512_add_ps(sum, more) : sum));
    }
}

__attribute__((target("amx-tile"))) void begin() { asm volatile("ldtilecfg %0" ::"m"(config)); }
__attribute__((target("amx-tile"))) void end() { _tile_release(); }

}  // namespace

// As in products.cpp; every n is at least 16.
extern "C" void kernel(const Bits* left, const Bits* first, const Bits* second, const Bits* third, const Bits* bias,
                       Bits* out, int64_t batch, int64_t count, int64_t width, int64_t n1, int64_t n2, int64_t n3,
                       int64_t biased) {
  const Bits* weights[] = {first, second, third};
  const int64_t outputs[] = {n1, n2, n3}, stride = n1 + n2 + n3, groups = (count + TILE - 1) / TILE;
  static thread_local Scratch scratch;
  const int64_t spread_size = groups * TILE * width;  // of one of the batch
  Bits* spread = reinterpret_cast<Bits*>(scratch.of(batch * spread_size / 2));
  int64_t blocks[4] = {};  // how many stand before each weight's
  for (int w = 0; w < 3; w++) blocks[w + 1] = blocks[w] + (outputs[w] + TILE - 1) / TILE;
#pragma omp parallel if (batch * count * stride * width > SMALL)
  {
    const int64_t all = batch * blocks[3], threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t start = all * thread / threads, stop = all * (thread + 1) / threads;
    const auto place = [&](int64_t each) {  // which weight, of which output on, in which of the batch
      const int64_t b = each / blocks[3], i = each % blocks[3];
      const int w = i < blocks[1] ? 0 : i < blocks[2] ? 1 : 2;
      const int64_t least = (i - blocks[w]) * TILE, most = outputs[w] - TILE;
      return Place{w, least < most ? least : most, b};
    };
    const auto weight_of = [&](Place at) { return weights[at.weight] + (at.b * outputs[at.weight] + at.n) * width; };
    if (start < stop) {
      const char* from = reinterpret_cast<const char*>(weight_of(place(start)));
      for (int64_t line = 0; line < 4 * TILE * width; line += 64) _mm_prefetch(from + line, _MM_HINT_T1);
    }
#pragma omp for schedule(static)
    for (int64_t each = 0; each < batch * groups; each++) {
      const int64_t b = each / groups, m = each % groups * TILE;
      spread_tiles(left + (b * count + m) * width, spread + each * TILE * width, count - m, width);
    }
    begin();
    alignas(64) float sums[GROUPS * TILE * TILE];
    for (int64_t each = start; each < stop; each++) {
      const Place at = place(each);
      const int64_t before = at.weight == 0 ? 0 : at.weight == 1 ? n1 : n1 + n2;
      const Bits* from = weight_of(at);
      const Bits* more = biased && at.weight == 0 ? bias + at.n : nullptr;
      for (int64_t g = 0; g < groups; g += GROUPS) {
        const Bits* of = spread + at.b * spread_size + g * TILE * width;
        switch (groups - g) {
          case 1: tiles<1>(of, from, sums, width, g == 0); break;
          case 2: tiles<2>(of, from, sums, width, g == 0); break;
          case 3: tiles<3>(of, from, sums, width, g == 0); break;
          default: tiles<4>(of, from, sums, width, g == 0);
        }
        for (int64_t h = 0; h < GROUPS && g + h < groups; h++) {
          const int64_t m = (g + h) * TILE;
          put(sums + h * TILE * TILE, more, out + (at.b * count + m) * stride + before + at.n, count - m, stride);
        }
      }
    }
    end();
  }
}
