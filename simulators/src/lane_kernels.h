/*!
 * \brief The kernels of lanes.h for one instruction set; lanes.cc includes this file once for each set.
 *
 * So it has no include guard and no includes. PIMFLOW_WIDTH is the number of words of a vector;
 * PIMFLOW_FROM_HALF(p) and PIMFLOW_ROUND_TO_HALF(v), if defined, load a vector of fp16 and round one of fp32.
 */

typedef float Floats __attribute__((vector_size(PIMFLOW_WIDTH * 4)));
typedef uint32_t Integers __attribute__((vector_size(PIMFLOW_WIDTH * 4)));  // sums modulo 2^32

template <typename T>
inline __attribute__((always_inline)) T Load(const void* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
inline __attribute__((always_inline)) void Store(void* to, T value) {
  __builtin_memcpy(to, &value, sizeof(T));
}

/*! \brief Adder tree over a power of two of elements, as a recursion over contiguous halves. */
template <typename Vector, typename Scalar, int kElements>
inline __attribute__((always_inline)) Vector Tree(const char* weights, int64_t lanes, const char* vector) {
  if constexpr (kElements == 1) {
    return Load<Vector>(weights) * Load<Scalar>(vector);
  } else {
    constexpr int kHalf = kElements / 2;
    return Tree<Vector, Scalar, kHalf>(weights, lanes, vector) +
           Tree<Vector, Scalar, kHalf>(weights + kHalf * lanes * 4, lanes, vector + kHalf * 4);
  }
}

template <typename Vector, typename Scalar, int kElements>
inline __attribute__((always_inline)) void CompRun(const char* weights, const char* vector, int64_t columns,
                                                   int64_t lanes, char* latch) {
  for (int64_t lane = 0; lane < lanes; lane += PIMFLOW_WIDTH) {
    const char *w = weights + lane * 4, *x = vector;
    Vector sum = Load<Vector>(latch + lane * 4);
    for (int64_t column = 0; column < columns; ++column) {
      sum += Tree<Vector, Scalar, kElements>(w, lanes, x);
      w += kElements * lanes * 4;
      x += kElements * 4;
    }
    Store(latch + lane * 4, sum);
  }
}

template <typename Vector, typename Scalar>
void CompAny(const char* weights, const char* vector, int64_t columns, int64_t elements, int64_t lanes,
             char* latch, char* tree) {
  constexpr int64_t kBytes = sizeof(Vector);
  for (int64_t lane = 0; lane < lanes; lane += PIMFLOW_WIDTH) {
    const char *w = weights + lane * 4, *x = vector;
    Vector sum = Load<Vector>(latch + lane * 4);
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t e = 0; e < elements; ++e) {
        Store(tree + e * kBytes, Load<Vector>(w + e * lanes * 4) * Load<Scalar>(x + e * 4));
      }
      for (int64_t width = elements; width > 1; width = (width + 1) / 2) {
        for (int64_t i = 0; i < width / 2; ++i) {
          Store(tree + i * kBytes,
                Load<Vector>(tree + 2 * i * kBytes) + Load<Vector>(tree + (2 * i + 1) * kBytes));
        }
        if (width % 2) Store(tree + width / 2 * kBytes, Load<Vector>(tree + (width - 1) * kBytes));
      }
      sum += Load<Vector>(tree);
      w += elements * lanes * 4;
      x += elements * 4;
    }
    Store(latch + lane * 4, sum);
  }
}

template <typename Vector, typename Scalar>
inline void DispatchComp(const char* weights, const char* vector, int64_t columns, int64_t elements, int64_t lanes,
                         char* latch, char* tree) {
  if (lanes == kLanes && elements == 16) {
    CompRun<Vector, Scalar, 16>(weights, vector, columns, kLanes, latch);
  } else if (lanes == kLanes && elements == 8) {
    CompRun<Vector, Scalar, 8>(weights, vector, columns, kLanes, latch);
  } else if (lanes == kLanes && elements == 32) {
    CompRun<Vector, Scalar, 32>(weights, vector, columns, kLanes, latch);
  } else {
    CompAny<Vector, Scalar>(weights, vector, columns, elements, lanes, latch, tree);
  }
}

void Comp(bool integer, const void* weights, const void* vector, int64_t columns, int64_t elements,
          int64_t lanes, void* latch, void* tree) {
  const auto *w = static_cast<const char*>(weights), *x = static_cast<const char*>(vector);
  auto *sum = static_cast<char*>(latch), *scratch = static_cast<char*>(tree);
  if (integer) {
    DispatchComp<Integers, uint32_t>(w, x, columns, elements, lanes, sum, scratch);
  } else {
    DispatchComp<Floats, float>(w, x, columns, elements, lanes, sum, scratch);
  }
}

void WidenHalf(const char* from, int64_t count, char* to) {
  int64_t i = 0;
#ifdef PIMFLOW_FROM_HALF
  for (; i + PIMFLOW_WIDTH <= count; i += PIMFLOW_WIDTH) {
    // Weights that are used once come from memory. The processor's own prefetch stops at every 4 KiB, and so reads
    // at half the rate. A distance of 4 KiB was the best of 1, 2, 4, 8 and 16 KiB.
    __builtin_prefetch(from + i * 2 + 4096);
    Store(to + i * 4, PIMFLOW_FROM_HALF(from + i * 2));
  }
#endif
  for (; i < count; ++i) Store(to + i * 4, HalfToFloatBits(Load<uint16_t>(from + i * 2)));
}

void Widen(Storage storage, const void* stored, int64_t count, void* operands) {
  const char* from = static_cast<const char*>(stored);
  char* to = static_cast<char*>(operands);
  if (storage == Storage::kFloat16) {
    WidenHalf(from, count, to);
  } else if (storage == Storage::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) {
      Store(to + i * 4, static_cast<uint32_t>(Load<uint16_t>(from + i * 2)) << 16);
    }
  } else if (storage == Storage::kInt8) {
    for (int64_t i = 0; i < count; ++i) Store(to + i * 4, static_cast<int32_t>(Load<int8_t>(from + i)));
  } else {
    __builtin_memcpy(to, from, count * 4);
  }
}

inline __attribute__((always_inline)) void StoreNumber(char* to, float value, uint32_t bits) {
  Store(to, value == value ? bits : 0x7fc00000u);
}

void Narrow(Storage storage, const void* operands, int64_t count, void* rounded) {
  const char* from = static_cast<const char*>(operands);
  char* to = static_cast<char*>(rounded);
  int64_t i = 0;
  if (storage == Storage::kFloat16) {
#ifdef PIMFLOW_FROM_HALF
    for (; i + PIMFLOW_WIDTH <= count; i += PIMFLOW_WIDTH) {
      const Floats value = (Floats)PIMFLOW_ROUND_TO_HALF(Load<Floats>(from + i * 4));
      Store(to + i * 4, value == value ? (Integers)value : Integers{} + 0x7fc00000u);
    }
#endif
    for (; i < count; ++i) {
      const float value = Load<float>(from + i * 4);
      StoreNumber(to + i * 4, value, RoundToHalfBits(Load<uint32_t>(from + i * 4)));
    }
  } else if (storage == Storage::kBFloat16) {
    for (; i < count; ++i) {
      const uint32_t bits = Load<uint32_t>(from + i * 4);
      StoreNumber(to + i * 4, Load<float>(from + i * 4), (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
    }
  } else if (storage == Storage::kInt8) {
    __builtin_memcpy(to, from, count * 4);
  } else {
    for (; i < count; ++i) StoreNumber(to + i * 4, Load<float>(from + i * 4), Load<uint32_t>(from + i * 4));
  }
}
