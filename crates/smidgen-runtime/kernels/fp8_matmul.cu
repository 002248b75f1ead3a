// D (M, N) = alpha · L (M, K) · Rᵀ (N, K) + C + bias, where L and R are 8-bit floats (e4m3) with a scale for each row.
// For GPUs whose cuBLASLt has no fp8 matmul with such scales (compute capability 8.9).
//
// A block of eight warps computes a tile of 128 by 128 of D, and each warp 64 by 32 of it. Tiles of depth 64 are copied
// asynchronously, two tiles ahead. The four 16-byte pieces of a row are permuted by the row number, so that the same
// piece of eight rows is in different banks. Rows and columns beyond the matrices are filled with zeros, and their
// results are not written. K is a multiple of 16.
// A fragment of m16n8k32 has the layout of `matrix_unit.cuh` with two bytes for each 16-bit element there.

#define TILE 128
#define DEPTH 64
#define STAGES 3
#define STAGE_BYTES (2 * TILE * DEPTH)

struct Fp8Matmul {
    const u8 *left;
    const float *left_scales;
    const u8 *right;
    const float *right_scales;
    act *to;
    i64 to_stride;
    const act *addend; // or null; may be `to`
    i64 addend_stride;
    const act *bias; // or null
    i32 rows;
    i32 columns;
    i32 depth;
    float alpha;
};

#if CAPABILITY >= 89

__device__ __forceinline__ void multiply_add_fp8(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The offset of a 16-byte piece of a row in a stage. The rows of R follow those of L.
__device__ __forceinline__ u32 piece_place(int row, int piece) {
    return row * DEPTH + ((piece ^ row / 2 % 4) * 16);
}

__device__ __forceinline__ void copy_stage(u32 stage, const Fp8Matmul &matmul, i32 first_row, i32 first_column,
                                           i32 depth) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool is_left = i < 2;
        const int at = threadIdx.x + i * 256, row = at / 4, piece = at % 4;
        const i32 own = is_left ? first_row + row : first_column + row - TILE;
        const i32 column = depth + piece * 16;
        const bool exists = own < (is_left ? matmul.rows : matmul.columns) && column < matmul.depth;
        const u8 *matrix = is_left ? matmul.left : matmul.right;
        copy_async_16(stage + piece_place(row, piece), matrix + (exists ? (i64)own * matmul.depth + column : 0),
                      exists);
    }
    copy_async_commit();
}

__device__ __forceinline__ void store_pair(act *to, float low, float high) {
#if defined(ACT_F32)
    *(float2 *)to = make_float2(low, high);
#else
    *(u32 *)to = pack_two<act>(low, high);
#endif
}

__device__ __forceinline__ void write_row(const Fp8Matmul &matmul, i32 row, i32 column, float low, float high) {
    if (row >= matmul.rows || column >= matmul.columns)
        return;
    const float scale = matmul.alpha * matmul.left_scales[row];
    low *= scale * matmul.right_scales[column];
    high *= scale * matmul.right_scales[column + 1];
    if (matmul.addend) {
        const act *addend = matmul.addend + row * matmul.addend_stride + column;
        low += to_float(addend[0]);
        high += to_float(addend[1]);
    }
    if (matmul.bias) {
        low += to_float(matmul.bias[column]);
        high += to_float(matmul.bias[column + 1]);
    }
    store_pair(matmul.to + row * matmul.to_stride + column, low, high);
}

#endif

extern "C" __global__ void __launch_bounds__(256) multiply_fp8(Fp8Matmul matmul) {
#if CAPABILITY >= 89
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i32 first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    const int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    const u32 base = shared_base();
    float sums[4][4][4] = {};
    const int steps = ceil_div(matmul.depth, DEPTH);
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step)
        copy_stage(base + step * STAGE_BYTES, matmul, first_row, first_column, step * DEPTH);
    for (int step = 0; step < steps; ++step) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        // Beyond the last step only zeros are copied, so that the number of pending groups is always the same.
        const int next = step + STAGES - 1;
        copy_stage(base + next % STAGES * STAGE_BYTES, matmul, first_row, first_column, next * DEPTH);
        const u32 stage = base + step % STAGES * STAGE_BYTES;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 left[4][4], right[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                load_matrices(left[i], stage + piece_place(warp_row + i * 16 + lane % 16, half * 2 + lane / 16));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = TILE + warp_column + i * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(right[i], stage + piece_place(row, half * 2 + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply_add_fp8(sums[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i32 row = first_row + warp_row + i * 16 + lane / 4;
            const i32 column = first_column + warp_column + j * 8 + lane % 4 * 2;
            write_row(matmul, row, column, sums[i][j][0], sums[i][j][1]);
            write_row(matmul, row + 8, column, sums[i][j][2], sums[i][j][3]);
        }
#endif
}
