// Rounds activations to fp8 (`fp8.cuh`), and transposes fp8 weights: fp8 matmuls need the summed dimension of both
// operands to be contiguous. Traffic: two bytes read and one written per activation, one byte read and one written per
// weight.

// One block per row.
extern "C" __global__ void __launch_bounds__(512)
    round_rows_fp8(RoundedRows to, const act *x, i64 stride, int columns) {
    x += (i64)blockIdx.x * stride;
    u8 *codes = to.codes + (i64)blockIdx.x * columns;
    Eight<act> held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; ++k)
        if (span_column(k) < columns)
            held[k] = read_eight<act>(x + span_column(k));
    float largest = largest_held(held, columns, to.factors), value[8];
    // The part of a wide row that does not fit in registers is read twice.
    const int step = 8 * blockDim.x;
    for (int first = span_column(HELD); first < columns; first += step) {
        load_eight<act>(x + first, value);
        scale_columns_of(to.factors, first, value);
        largest = fmaxf(largest, largest_of(value));
    }
    const float factor = write_scale(to.scales, largest);
    write_held(codes, held, columns, to.factors, factor);
    for (int first = span_column(HELD); first < columns; first += step) {
        load_eight<act>(x + first, value);
        scale_columns_of(to.factors, first, value);
        write_codes(codes + first, value, factor);
    }
}

#define SIDE 64 // side of the square of bytes that a block transposes

// to[k][n] = from[n][k], and a scale of one for each k, because the scales of n are multiplied into the other operand.
// Rows and columns are multiples of 16. A block of 256 threads transposes a square of 64 by 64 bytes, a thread 4 by 4
// bytes.
extern "C" __global__ void __launch_bounds__(256)
    transpose_fp8(u8 *to, float *ones, const u8 *from, int rows, int columns) {
    __shared__ u32 tile[SIDE][SIDE / 4 + 1]; // indexed by column of the source; a word is four rows
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
