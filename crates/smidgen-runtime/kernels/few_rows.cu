// Up to eight rows of x times a stored matrix: y (T, N) = x (T, K)·Wᵀ, plus a bias, a residual and h·Bᵀ of an adapter.
//
// Generation multiplies one row per sequence, so the time is that of reading the weights. Each is read once, as it is
// stored, by the formats of `decode.cuh`: 7B in bf16 is 15.2 GB, 3.2 ms at 4.8 TB/s.
// A team of `split` warps has two rows of W. Lanes take eight elements in turn, with all loads of a round in flight
// before the first is used; x comes from the cache. Teams of small matrices have more warps, so that all
// multiprocessors have work. Every sum has an order that follows from the shape.
// Left out: rows that are not multiples of eight elements or not aligned, and GGUF.

#define FEW_THREADS 256
#define FEW_WARPS (FEW_THREADS / WARP)
#define FEW_OUTPUTS 2
#define FEW_IN_FLIGHT 4

struct FewRows {
    i64 first_row; // of the matrix in its tensor
    i32 outputs;   // N
    i32 rows;      // T
    const act *x;
    i64 x_stride;
    act *y;
    i64 y_stride;
    const act *bias;     // or null
    const act *residual; // or null
    i64 residual_stride;
    const act *h; // or null
    i64 h_stride;
    const act *b;
    i64 b_stride;
    i32 rank;
    float scale;
    i32 split; // warps of a team
};

template <typename Format, int ROWS>
__device__ __forceinline__ void few_rows(const Source &source, const FewRows &few) {
    const Format format(source);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int teams = FEW_WARPS / few.split, team = warp / few.split, part = warp % few.split;
    const i32 first_output = ((i32)blockIdx.x * teams + team) * FEW_OUTPUTS;
    float sums[FEW_OUTPUTS][ROWS] = {};
    // Rows beyond the last one repeat it, and are not written.
    i64 weight_rows[FEW_OUTPUTS];
#pragma unroll
    for (int o = 0; o < FEW_OUTPUTS; ++o)
        weight_rows[o] = min(first_output + o, few.outputs - 1);
    const i32 step = few.split * WARP * 8;
    for (i32 base = (part * WARP + lane) * 8; base < source.columns; base += FEW_IN_FLIGHT * step) {
        typename Format::Raw raw[FEW_IN_FLIGHT][FEW_OUTPUTS];
#pragma unroll
        for (int i = 0; i < FEW_IN_FLIGHT; ++i) {
            const i32 column = min(base + i * step, source.columns - 8);
#pragma unroll
            for (int o = 0; o < FEW_OUTPUTS; ++o)
                raw[i][o] = format.read(few.first_row + weight_rows[o], column);
        }
#pragma unroll
        for (int i = 0; i < FEW_IN_FLIGHT; ++i) {
            const i32 column = base + i * step;
            if (column >= source.columns)
                break;
            float weights[FEW_OUTPUTS][8];
#pragma unroll
            for (int o = 0; o < FEW_OUTPUTS; ++o)
                format.expand(raw[i][o], weights[o]);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (row >= few.rows)
                    break;
                float x[8];
                load_eight<act>(few.x + row * few.x_stride + column, x);
#pragma unroll
                for (int o = 0; o < FEW_OUTPUTS; ++o)
#pragma unroll
                    for (int c = 0; c < 8; ++c)
                        sums[o][row] = fmaf(x[c], weights[o][c], sums[o][row]);
            }
        }
    }
    if (few.h && part == 0) {
        for (i32 r = lane; r < few.rank; r += WARP) {
#pragma unroll
            for (int o = 0; o < FEW_OUTPUTS; ++o) {
                const float weight = few.scale * to_float(few.b[weight_rows[o] * few.b_stride + r]);
#pragma unroll
                for (int row = 0; row < ROWS; ++row)
                    if (row < few.rows)
                        sums[o][row] = fmaf(to_float(few.h[row * few.h_stride + r]), weight, sums[o][row]);
            }
        }
    }
    __shared__ float parts[FEW_WARPS][FEW_OUTPUTS * ROWS];
#pragma unroll
    for (int o = 0; o < FEW_OUTPUTS; ++o)
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float sum = warp_sum(sums[o][row]);
            if (lane == 0)
                parts[warp][o * ROWS + row] = sum;
        }
    __syncthreads();
    for (int at = threadIdx.x; at < teams * FEW_OUTPUTS * ROWS; at += FEW_THREADS) {
        const int of_team = at / (FEW_OUTPUTS * ROWS), o = at / ROWS % FEW_OUTPUTS, row = at % ROWS;
        const i32 output = ((i32)blockIdx.x * teams + of_team) * FEW_OUTPUTS + o;
        if (output >= few.outputs || row >= few.rows)
            continue;
        float sum = 0.0f;
        for (int p = 0; p < few.split; ++p)
            sum += parts[of_team * few.split + p][o * ROWS + row];
        if (few.bias)
            sum += to_float(few.bias[output]);
        if (few.residual)
            sum += to_float(few.residual[row * few.residual_stride + output]);
        few.y[row * few.y_stride + output] = to_act(sum);
    }
}

#define FEW_KERNEL(NAME, ROWS, ...)                                                                                   \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS)                                                          \
        few_rows_##NAME##_##ROWS(FewRows few, const u8 *bytes, i64 total_rows, i64 stride, i32 columns, i32 code) {     \
        const Source source = {bytes, total_rows, stride, columns, code};                                              \
        few_rows<__VA_ARGS__, ROWS>(source, few);                                                                      \
    }

#define FEW_KERNELS(NAME, ...)                                                                                        \
    FEW_KERNEL(NAME, 1, __VA_ARGS__)                                                                                   \
    FEW_KERNEL(NAME, 2, __VA_ARGS__)                                                                                   \
    FEW_KERNEL(NAME, 4, __VA_ARGS__)                                                                                   \
    FEW_KERNEL(NAME, 8, __VA_ARGS__)

FEW_KERNELS(plain, Plain<act>)
FEW_KERNELS(int8, Int8Rows)
FEW_KERNELS(fp8, Fp8<false>)
FEW_KERNELS(fp8_blocks, Fp8<true>)
FEW_KERNELS(bnb4, Bnb4<false>)
FEW_KERNELS(bnb4_nested, Bnb4<true>)
