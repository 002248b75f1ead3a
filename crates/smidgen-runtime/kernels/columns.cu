// DoRA. z = x (W + s B A)^T is scaled by a gain per output channel n, and the gain is trained through its magnitude m:
//     norm[n] = |row n of W + s B A|          y[t, n] = z[t, n] m[n] / norm[n] + bias[n]
// As in the paper, no gradient flows through the norm, so dz[t, n] = dy[t, n] m[n] / norm[n] (the same kernel as
// forward, without a bias) and
//     dm[n] = sum over t of dy[t, n] z[t, n] / norm[n]
// The gain is read once for eight columns and several rows, so about two bf16 are moved per element.
// Sums over rows are partial sums of 128 rows in f32, which are then added in order in f64.
// Row norms read rows that `decode.cu` has decoded to f32 and add s B A in registers, so that the sum is never stored.
// Each block has eight rows and reads A (R, K) from the cache. Left out: a guard against a row of zeros, as on the CPU.

#define COLUMN_THREADS 256
#define COLUMN_ROWS 4

// ── the gain ──────────────────────────────────────────────────────────────────────────────────────

// `lanes` threads (a divisor of the block's threads) handle eight columns each. The other threads handle other rows.
extern "C" __global__ void __launch_bounds__(COLUMN_THREADS)
    scale_columns(const act *z, i64 z_stride, const float *magnitude, const float *norm, const void *bias,
                  i32 bias_dtype, act *y, i64 y_stride, i32 rows, i32 columns, i32 lanes, i32 eight) {
    const i32 column = (blockIdx.x * lanes + threadIdx.x % lanes) * 8;
    const i32 at_once = COLUMN_THREADS / lanes;
    const i32 first = blockIdx.y * (at_once * COLUMN_ROWS) + threadIdx.x / lanes;
    if (column >= columns)
        return;
    const i32 count = min(8, columns - column);
    float gain[8], addend[8];
#pragma unroll
    for (int at = 0; at < 8; ++at) {
        gain[at] = at < count ? __fdiv_rn(magnitude[column + at], norm[column + at]) : 0.0f;
        addend[at] = bias && at < count ? stored_float(bias, bias_dtype, column + at) : 0.0f;
    }
    if (eight) {
        Eight<act> raw[COLUMN_ROWS];
#pragma unroll
        for (int turn = 0; turn < COLUMN_ROWS; ++turn)
            if (first + turn * at_once < rows)
                raw[turn] = read_eight<act>(z + (i64)(first + turn * at_once) * z_stride + column);
#pragma unroll
        for (int turn = 0; turn < COLUMN_ROWS; ++turn) {
            const i32 row = first + turn * at_once;
            if (row >= rows)
                return;
            float x[8];
            unpack<act>(raw[turn], x);
#pragma unroll
            for (int at = 0; at < 8; ++at) {
                x[at] = __fmul_rn(x[at], gain[at]);
                if (bias)
                    x[at] = __fadd_rn(x[at], addend[at]);
            }
            store_eight<act>(y + (i64)row * y_stride + column, x);
        }
        return;
    }
#pragma unroll 1
    for (int turn = 0; turn < COLUMN_ROWS; ++turn) {
        const i32 row = first + turn * at_once;
        if (row >= rows)
            return;
#pragma unroll
        for (int at = 0; at < 8; ++at) {
            if (at >= count)
                break;
            float x = __fmul_rn(to_float(z[(i64)row * z_stride + column + at]), gain[at]);
            if (bias)
                x = __fadd_rn(x, addend[at]);
            y[(i64)row * y_stride + column + at] = to_act(x);
        }
    }
}

// ── the gradient of the magnitudes ────────────────────────────────────────────────────────────────

#define SUM_ROWS 128
#define SUM_THREADS 64
#define SUM_IN_FLIGHT 4

// partials[blockIdx.y, column] = the sum of dy z over 128 rows, in their order; a thread has eight columns.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    magnitude_grad_partials(const act *dy, i64 dy_stride, const act *z, i64 z_stride, i32 rows, i32 columns, i32 eight,
                            float *partials) {
    const i32 column = (blockIdx.x * SUM_THREADS + threadIdx.x) * 8;
    if (column >= columns)
        return;
    const i32 begin = blockIdx.y * SUM_ROWS, end = min(begin + SUM_ROWS, rows);
    const i32 count = min(8, columns - column);
    float sums[8] = {};
    if (eight) {
        for (i32 first = begin; first < end; first += SUM_IN_FLIGHT) {
            Eight<act> dy_raw[SUM_IN_FLIGHT], z_raw[SUM_IN_FLIGHT];
#pragma unroll
            for (int at = 0; at < SUM_IN_FLIGHT; ++at) {
                const i32 row = min(first + at, end - 1);
                dy_raw[at] = read_eight<act>(dy + (i64)row * dy_stride + column);
                z_raw[at] = read_eight<act>(z + (i64)row * z_stride + column);
            }
#pragma unroll
            for (int at = 0; at < SUM_IN_FLIGHT; ++at) {
                if (first + at >= end)
                    break;
                float dy_here[8], z_here[8];
                unpack<act>(dy_raw[at], dy_here);
                unpack<act>(z_raw[at], z_here);
#pragma unroll
                for (int element = 0; element < 8; ++element)
                    sums[element] = __fadd_rn(sums[element], __fmul_rn(dy_here[element], z_here[element]));
            }
        }
    } else {
        for (i32 row = begin; row < end; ++row) {
#pragma unroll
            for (int at = 0; at < 8; ++at) {
                if (at >= count)
                    break;
                const float dy_here = to_float(dy[(i64)row * dy_stride + column + at]);
                const float z_here = to_float(z[(i64)row * z_stride + column + at]);
                sums[at] = __fadd_rn(sums[at], __fmul_rn(dy_here, z_here));
            }
        }
    }
#pragma unroll
    for (int at = 0; at < 8; ++at)
        if (at < count)
            partials[(i64)blockIdx.y * columns + column + at] = sums[at];
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    magnitude_grad_total(const float *partials, i32 groups, i32 columns, const float *norm, float *dmagnitude) {
    const i32 column = blockIdx.x * SUM_THREADS + threadIdx.x;
    if (column >= columns)
        return;
    double total = 0.0;
#pragma unroll 4
    for (i32 group = 0; group < groups; ++group)
        total += (double)partials[(i64)group * columns + column];
    dmagnitude[column] = (float)((double)dmagnitude[column] + total / (double)norm[column]);
}

// ── row norms ─────────────────────────────────────────────────────────────────────────────────────

#define NORM_ROWS 8

// norms[row] = |weight[row] + scale * b[row] * a|, for rows decoded to f32 without spare columns. The shared memory
// holds a tile of b, (R, NORM_ROWS). The weight is read once; with a separate matmul it would be read twice.
extern "C" __global__ void __launch_bounds__(COLUMN_THREADS)
    row_norms(const float *weight, const float *a, const float *b, float scale, i32 rank, i32 rows, i32 columns,
              i32 eight, float *norms) {
    extern __shared__ float4 shared_tile[];
    float *b_tile = (float *)shared_tile;
    const i32 row = blockIdx.x * NORM_ROWS;
    for (i32 at = threadIdx.x; at < rank * NORM_ROWS; at += COLUMN_THREADS) {
        const i32 k = at / NORM_ROWS, in_tile = at % NORM_ROWS;
        b_tile[at] = row + in_tile < rows ? b[(i64)(row + in_tile) * rank + k] * scale : 0.0f;
    }
    __syncthreads();
    double totals[NORM_ROWS] = {};
    const i32 groups = eight ? columns / 8 : 0;
    for (i32 group = threadIdx.x; group < groups; group += COLUMN_THREADS) {
        float w[NORM_ROWS][8];
#pragma unroll
        for (int at = 0; at < NORM_ROWS; ++at)
            load_eight<float>(weight + (i64)min(row + at, rows - 1) * columns + group * 8, w[at]);
        const float *a_row = a + group * 8;
#pragma unroll 2
        for (i32 k = 0; k < rank; ++k, a_row += columns) {
            float a_here[8], b_here[NORM_ROWS];
            load_eight<float>(a_row, a_here);
            load_eight<float>(b_tile + k * NORM_ROWS, b_here);
#pragma unroll
            for (int at = 0; at < NORM_ROWS; ++at)
#pragma unroll
                for (int element = 0; element < 8; ++element)
                    w[at][element] = fmaf(b_here[at], a_here[element], w[at][element]);
        }
#pragma unroll
        for (int at = 0; at < NORM_ROWS; ++at) {
            float sum = 0.0f;
#pragma unroll
            for (int element = 0; element < 8; ++element)
                sum = fmaf(w[at][element], w[at][element], sum);
            totals[at] += (double)sum;
        }
    }
    for (i32 column = groups * 8 + threadIdx.x; column < columns; column += COLUMN_THREADS) {
#pragma unroll
        for (int at = 0; at < NORM_ROWS; ++at) {
            float w = weight[(i64)min(row + at, rows - 1) * columns + column];
#pragma unroll 1
            for (i32 k = 0; k < rank; ++k)
                w = fmaf(b_tile[k * NORM_ROWS + at], a[(i64)k * columns + column], w);
            totals[at] += (double)w * (double)w;
        }
    }
#pragma unroll
    for (int at = 0; at < NORM_ROWS; ++at) {
        const double total = block_sum(totals[at]);
        if (threadIdx.x == 0 && row + at < rows)
            norms[row + at] = (float)sqrt(total);
    }
}
