// out = left weight^T (+ bias) for few rows.
namespace {

constexpr int64_t SMALL = 1 << 15;  // products that one thread does

inline float float_of_one(Bits bits) {
  const uint32_t whole = uint32_t(bits) << 16;
  float found;
  std::memcpy(&found, &whole, sizeof(found));
  return found;
}

template <int M, int N>
inline void block(const Left* left, const Bits* weight, const Bits* bias, Bits* out, int64_t width, int64_t stride) {
  const Floats total = products<M, N, true>(left, weight, width);
  alignas(64) float found[WIDE * WIDE];
  store(found, total);
  if (bias)
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) found[m * WIDE + n] += float_of_one(bias[n]);
  alignas(32) Bits nearest[WIDE * WIDE];
  _mm256_store_si256(reinterpret_cast<__m256i*>(nearest), rounded(load(found)));
  for (int m = 0; m < M; m++) std::memcpy(out + m * stride, nearest + m * WIDE, N * sizeof(Bits));
}

template <int N>
void sweep(const Left* left, const Bits* weight, const Bits* bias, Bits* out, int64_t count, int64_t width, int64_t stride) {
  for (int64_t m = 0; m < count; m += WIDE) {
    const Left* from = left + m * width;
    Bits* to = out + m * stride;
    switch (count - m) {
      case 1: block<1, N>(from, weight, bias, to, width, stride); break;
      case 2: block<2, N>(from, weight, bias, to, width, stride); break;
      case 3: block<3, N>(from, weight, bias, to, width, stride); break;
      default: block<4, N>(from, weight, bias, to, width, stride);
    }
  }
}

}  // namespace

// left [batch, count, width]; up to three weights [batch, n, width], side by side, where n > 0; bias [n1] of the first
// where biased, in a batch of one; out [batch, count, n1 + n2 + n3].
extern "C" void kernel(const Bits* left, const Bits* first, const Bits* second, const Bits* third, const Bits* bias,
                       Bits* out, int64_t batch, int64_t count, int64_t width, int64_t n1, int64_t n2, int64_t n3,
                       int64_t biased) {
  const Bits* weights[] = {first, second, third};
  const int64_t outputs[] = {n1, n2, n3}, stride = n1 + n2 + n3;
  static thread_local Scratch scratch;
  Left* exact = reinterpret_cast<Left*>(scratch.of(batch * count * width));
  for (int64_t b = 0; b < batch; b++)
    for (int64_t m = 0; m < count; m += WIDE) {
      const int64_t at = (b * count + m) * width;
      spread(left + at, exact + at, count - m < WIDE ? count - m : WIDE, width);
    }
  int64_t blocks[4] = {};  // how many stand before each weight's
  for (int w = 0; w < 3; w++) blocks[w + 1] = blocks[w] + (outputs[w] + WIDE - 1) / WIDE;
#pragma omp parallel for schedule(static) if (batch * count * stride * width > SMALL)
  for (int64_t each = 0; each < batch * blocks[3]; each++) {
    const int64_t b = each / blocks[3], i = each % blocks[3];
    const int w = i < blocks[1] ? 0 : i < blocks[2] ? 1 : 2;
    const int64_t n = (i - blocks[w]) * WIDE, before = w == 0 ? 0 : w == 1 ? n1 : n1 + n2;
    const Left* of = exact + b * count * width;
    const Bits* from = weights[w] + (b * outputs[w] + n) * width;
    const Bits* more = biased && w == 0 ? bias + n : nullptr;
    Bits* to = out + b * count * stride + before + n;
    switch (outputs[w] - n) {
      case 1: sweep<1>(of, from, more, to, count, width, stride); break;
      case 2: sweep<2>(of, from, more, to, count, width, stride); break;
      case 3: sweep<3>(of, from, more, to, count, width, stride); break;
      default: sweep<4>(of, from, more, to, count, width, stride);
    }
  }
}
