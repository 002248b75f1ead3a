// Rounds rows of activations to 8-bit floats (e4m3) with a scale for each row, in a kernel of its own or in the kernel
// that computes them. A thread keeps its part of a row in registers: spans of eight elements, `blockDim.x` spans apart.
// The scale of a row is its largest magnitude divided by 448, the largest number of the format. Rounding is that of
// `quant/fp8.rs`, except that infinities and NaN stay infinities or NaN.

#define HELD 5 // spans of a row that a thread keeps in registers
#define LARGEST_E4M3 448.0f
#define SMALLEST_SCALE 1.17549435e-38f

// The destination of rounded rows: codes without gaps between rows, and a scale for each row. If `factors` is not null,
// column j is multiplied by factors[j] first. Columns are a multiple of 16.
struct RoundedRows {
    u8 *codes;
    float *scales;
    const float *factors; // or null
};

// Two floats as two bytes, `low` at the lower address; magnitudes above 448 become 448.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
#if CAPABILITY >= 89
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    // Never called: GPUs without this instruction cannot multiply fp8 either, and the device refuses the plan.
    return 0;
#endif
}

__device__ __forceinline__ void scale_columns_of(const float *factors, int first, float (&x)[8]) {
    if (factors) {
        float f[8];
        load_eight<float>(factors + first, f);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            x[i] *= f[i];
    }
}

__device__ __forceinline__ float largest_of(const float (&x)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        largest = fmaxf(largest, fabsf(x[i]));
    return largest;
}

__device__ __forceinline__ void write_codes(u8 *to, const float (&x)[8], float factor) {
    u32 words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        words[i] = e4m3_pair(x[4 * i] * factor, x[4 * i + 1] * factor) |
                   e4m3_pair(x[4 * i + 2] * factor, x[4 * i + 3] * factor) << 16;
    *(uint2 *)to = make_uint2(words[0], words[1]);
}

// The first column of this thread's span `index`.
__device__ __forceinline__ int span_column(int index) { return 8 * (threadIdx.x + index * blockDim.x); }

template <int V>
__device__ __forceinline__ float largest_held(const Eight<act> (&held)[V], int columns, const float *factors) {
    float largest = 0.0f, value[8];
#pragma unroll
    for (int k = 0; k < V; ++k)
        if (span_column(k) < columns) {
            unpack<act>(held[k], value);
            scale_columns_of(factors, span_column(k), value);
            largest = fmaxf(largest, largest_of(value));
        }
    return largest;
}

// Writes the scale of this block's row, and returns the factor for its elements. All threads of the block must call.
__device__ __forceinline__ float write_scale(float *scales, float largest_of_thread) {
    const float scale = block_max(largest_of_thread) * (1.0f / LARGEST_E4M3);
    if (threadIdx.x == 0)
        scales[blockIdx.x] = scale;
    return scale < SMALLEST_SCALE ? 0.0f : 1.0f / scale;
}

template <int V>
__device__ __forceinline__ void write_held(u8 *codes, const Eight<act> (&held)[V], int columns, const float *factors,
                                           float factor) {
    float value[8];
#pragma unroll
    for (int k = 0; k < V; ++k)
        if (span_column(k) < columns) {
            unpack<act>(held[k], value);
            scale_columns_of(factors, span_column(k), value);
            write_codes(codes + span_column(k), value, factor);
        }
}

// Rounds the row of this block, which its threads hold in registers.
template <int V>
__device__ __forceinline__ void round_held(const RoundedRows &to, const Eight<act> (&held)[V], int columns) {
    const float factor = write_scale(to.scales, largest_held(held, columns, to.factors));
    write_held(to.codes + (i64)blockIdx.x * columns, held, columns, to.factors, factor);
}
