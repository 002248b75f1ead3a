// Rounds activations to floats of eight bits (e4m3) with a scale for each token, and transposes weights that are stored
// so: matmuls in fp8 want the summed dimension of both operands to be contiguous.
// The scale of a token is its largest magnitude divided by 448, the largest number of the format. Rounding is that of
// `quant/fp8.rs`, except that what is not finite stays so. Traffic: two bytes read and one written per activation, and
// one of each per weight.

#define HELD 5 // groups of eight elements that a thread keeps in registers
#define LARGEST_E4M3 448.0f
#define SMALLEST_SCALE 1.17549435e-38f

// Two floats as two bytes, `low` at the lower address; magnitudes above 448 become 448.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
#if CAPABILITY >= 89
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    // Without the instruction there is no unit that multiplies such numbers either: the device refuses the plan.
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

// One block per row: codes (rows, columns) without gaps, and a scale for each row. With `factors`, column j is multiplied
// by factors[j] first. Columns are a multiple of 16.
extern "C" __global__ void __launch_bounds__(512)
    round_rows_fp8(u8 *codes, float *scales, const act *x, i64 stride, int columns, const float *factors) {
    x += (i64)blockIdx.x * stride;
    codes += (i64)blockIdx.x * columns;
    const int step = 8 * blockDim.x, own = 8 * threadIdx.x;
    Eight<act> held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k)
        if (own + k * step < columns)
            held[k] = read_eight<act>(x + own + k * step);
    float largest = 0.0f, value[8];
#pragma unroll
    for (int k = 0; k < HELD; ++k)
        if (own + k * step < columns) {
            unpack<act>(held[k], value);
            scale_columns_of(factors, own + k * step, value);
            largest = fmaxf(largest, largest_of(value));
        }
    for (int first = own + HELD * step; first < columns; first += step) {
        load_eight<act>(x + first, value);
        scale_columns_of(factors, first, value);
        largest = fmaxf(largest, largest_of(value));
    }
    const float scale = block_max(largest) * (1.0f / LARGEST_E4M3);
    const float factor = scale < SMALLEST_SCALE ? 0.0f : 1.0f / scale;
    if (threadIdx.x == 0)
        scales[blockIdx.x] = scale;
#pragma unroll
    for (int k = 0; k < HELD; ++k)
        if (own + k * step < columns) {
            unpack<act>(held[k], value);
            scale_columns_of(factors, own + k * step, value);
            write_codes(codes + own + k * step, value, factor);
        }
    for (int first = own + HELD * step; first < columns; first += step) {
        load_eight<act>(x + first, value);
        scale_columns_of(factors, first, value);
        write_codes(codes + first, value, factor);
    }
}

#define SIDE 64 // of a square of bytes

// to[k][n] = from[n][k], and a scale of one for each k: the scales of n go into the other operand. Rows and columns are
// multiples of 16. A block of 256 threads turns a square of 64 by 64 bytes: a thread has four by four of them.
extern "C" __global__ void __launch_bounds__(256)
    transpose_fp8(u8 *to, float *ones, const u8 *from, int rows, int columns) {
    __shared__ u32 tile[SIDE][SIDE / 4 + 1]; // by column of the source; a word is four rows
    const int first_row = blockIdx.y * SIDE, first_column = blockIdx.x * SIDE;
    const int across = threadIdx.x % 16, down = threadIdx.x / 16;
    if (blockIdx.y == 0 && threadIdx.x < SIDE && first_column + (int)threadIdx.x < columns)
        ones[first_column + threadIdx.x] = 1.0f;
    const int row = first_row + 4 * down, column = first_column + 4 * across;
    if (row < rows && column < columns) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = *(const u32 *)(from + (i64)(row + i) * columns + column);
        const u32 low01 = __byte_perm(words[0], words[1], 0x5140), high01 = __byte_perm(words[0], words[1], 0x7362);
        const u32 low23 = __byte_perm(words[2], words[3], 0x5140), high23 = __byte_perm(words[2], words[3], 0x7362);
        tile[4 * across][down] = __byte_perm(low01, low23, 0x5410);
        tile[4 * across + 1][down] = __byte_perm(low01, low23, 0x7632);
        tile[4 * across + 2][down] = __byte_perm(high01, high23, 0x5410);
        tile[4 * across + 3][down] = __byte_perm(high01, high23, 0x7632);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int k = first_column + down + 16 * i, n = first_row + 4 * across;
        if (k < columns && n < rows)
            *(u32 *)(to + (i64)k * rows + n) = tile[down + 16 * i][across];
    }
}
