// out = left weight^T (+ bias) by the tiles of AMX, over weights as they are.
#include <omp.h>

namespace {

constexpr int GROUPS = 4;               // groups of 16 rows that are multiplied together
constexpr int64_t SMALL = 1 << 15;      // products that one thread does

struct Place {
  int weight;
  int64_t n, b;
};

// Adds the bias, rounds, and writes 16 outputs of `count` rows. sums: [outputs, rows].
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
  int64_t blocks[4] = {};  // blocks[w]: blocks of the weights before w
  for (int w = 0; w < 3; w++) blocks[w + 1] = blocks[w] + (outputs[w] + TILE - 1) / TILE;
#pragma omp parallel if (batch * count * stride * width > SMALL)
  {
    const int64_t all = batch * blocks[3], threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t start = all * thread / threads, stop = all * (thread + 1) / threads;
    const auto place = [&](int64_t each) {  // the weight, its first output and the batch entry of a block
      const int64_t b = each / blocks[3], i = each % blocks[3];
      const int w = i < blocks[1] ? 0 : i < blocks[2] ? 1 : 2;
      // The last block of a weight may overlap the one before, and writes the same bits there.
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
    begin_tiles();
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
    end_tiles();
  }
}
