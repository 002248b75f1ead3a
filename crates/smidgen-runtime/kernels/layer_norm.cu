// Layer norms (with a mean) and their gradients, with one block per row.
//
// Forward, for a row of C channels:  m = mean(x)   r = 1 / sqrt(mean((x - m)²) + eps)   n = (x - m) r   y = n w + b
// Backward: let g = dy w be the gradient of n. x_j changes n_i directly, through m and through r:
//     dn_i / dx_j = r (δ_ij - 1/C) + (x_i - m) dr/dx_j,   dr/dx_j = -r³ (x_j - m) / C = -r² n_j / C
//                 = r (δ_ij - 1/C - n_i n_j / C)
// so summing g_i dn_i / dx_j over i gives  dx = r (g - mean(g) - n mean(g n)).
// m and r are recomputed from x, never stored. In the `_two` kernels, threads keep two spans of eight channels in
// registers between the passes. The `_any` kernels, for rows that are wide or not aligned, read the row again, element
// by element. Outputs may be inputs: all reads of an element precede its write. The order of sums depends only on the
// sizes. The gradient of the weight is the sum of dy n over the rows. `bias` and `addend` may be null.
// Left out: the gradient of the bias, a sum of rows.

struct Statistics {
    float mean, inverse;
};

// ── rows in registers ────────────────────────────────────────────────────────────────────────────

struct HeldRow {
    float x[2][8];
    bool here[2];
    int first[2];
};

__device__ __forceinline__ HeldRow hold_row(const act *x, int columns) {
    HeldRow row;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        row.first[k] = 8 * (threadIdx.x + k * blockDim.x);
        row.here[k] = row.first[k] < columns;
        if (row.here[k])
            load_eight<act>(x + row.first[k], row.x[k]);
    }
    return row;
}

__device__ __forceinline__ Statistics statistics_of(const HeldRow &row, int columns, float eps) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int k = 0; k < 2; ++k)
        if (row.here[k])
#pragma unroll
            for (int i = 0; i < 8; ++i)
                sum += row.x[k][i];
    float mean = block_sum(sum) / (float)columns;
#pragma unroll
    for (int k = 0; k < 2; ++k)
        if (row.here[k])
#pragma unroll
            for (int i = 0; i < 8; ++i)
                squares += (row.x[k][i] - mean) * (row.x[k][i] - mean);
    return Statistics{mean, 1.0f / sqrtf(block_sum(squares) / (float)columns + eps)};
}

extern "C" __global__ void __launch_bounds__(512)
    layer_norm_two(const act *x, i64 x_stride, const void *weight, int weight_dtype, const void *bias, int bias_dtype,
                   float eps, act *y, i64 y_stride, int columns) {
    HeldRow row = hold_row(x + blockIdx.x * x_stride, columns);
    Statistics is = statistics_of(row, columns, eps);
    y += blockIdx.x * y_stride;
#pragma unroll
    for (int k = 0; k < 2; ++k)
        if (row.here[k]) {
            float w[8], b[8] = {};
            stored_eight(weight, weight_dtype, row.first[k], w);
            if (bias != nullptr)
                stored_eight(bias, bias_dtype, row.first[k], b);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                row.x[k][i] = (row.x[k][i] - is.mean) * is.inverse * w[i] + b[i];
            store_eight<act>(y + row.first[k], row.x[k]);
        }
}

extern "C" __global__ void __launch_bounds__(512)
    layer_norm_grad_two(const act *x, i64 x_stride, const void *weight, int weight_dtype, float eps, const act *dy,
                        i64 dy_stride, const act *addend, i64 addend_stride, act *dx, i64 dx_stride, int columns) {
    HeldRow row = hold_row(x + blockIdx.x * x_stride, columns);
    HeldRow slope = hold_row(dy + blockIdx.x * dy_stride, columns);
    Statistics is = statistics_of(row, columns, eps);
    dx += blockIdx.x * dx_stride;
    float sum = 0.0f, products = 0.0f;
#pragma unroll
    for (int k = 0; k < 2; ++k)
        if (row.here[k]) {
            float w[8];
            stored_eight(weight, weight_dtype, row.first[k], w);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                slope.x[k][i] *= w[i];
                row.x[k][i] = (row.x[k][i] - is.mean) * is.inverse;
                sum += slope.x[k][i];
                products += slope.x[k][i] * row.x[k][i];
            }
        }
    float mean_g = block_sum(sum) / (float)columns, mean_gn = block_sum(products) / (float)columns;
#pragma unroll
    for (int k = 0; k < 2; ++k)
        if (row.here[k]) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                row.x[k][i] = is.inverse * (slope.x[k][i] - mean_g - row.x[k][i] * mean_gn);
            if (addend != nullptr) {
                float more[8];
                load_eight<act>(addend + blockIdx.x * addend_stride + row.first[k], more);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    row.x[k][i] += more[i];
            }
            store_eight<act>(dx + row.first[k], row.x[k]);
        }
}

// ── rows of any width ────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ Statistics statistics_of(const act *x, int columns, float eps) {
    float sum = 0.0f, squares = 0.0f;
    for (int column = threadIdx.x; column < columns; column += blockDim.x)
        sum += to_float(x[column]);
    float mean = block_sum(sum) / (float)columns;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        float difference = to_float(x[column]) - mean;
        squares += difference * difference;
    }
    return Statistics{mean, 1.0f / sqrtf(block_sum(squares) / (float)columns + eps)};
}

extern "C" __global__ void __launch_bounds__(256)
    layer_norm_any(const act *x, i64 x_stride, const void *weight, int weight_dtype, const void *bias, int bias_dtype,
                   float eps, act *y, i64 y_stride, int columns) {
    x += blockIdx.x * x_stride;
    y += blockIdx.x * y_stride;
    Statistics is = statistics_of(x, columns, eps);
    for (int column = threadIdx.x; column < columns; column += blockDim.x)
        y[column] = to_act((to_float(x[column]) - is.mean) * is.inverse * stored_float(weight, weight_dtype, column) +
                           (bias != nullptr ? stored_float(bias, bias_dtype, column) : 0.0f));
}

extern "C" __global__ void __launch_bounds__(256)
    layer_norm_grad_any(const act *x, i64 x_stride, const void *weight, int weight_dtype, float eps, const act *dy,
                        i64 dy_stride, const act *addend, i64 addend_stride, act *dx, i64 dx_stride, int columns) {
    x += blockIdx.x * x_stride;
    dy += blockIdx.x * dy_stride;
    dx += blockIdx.x * dx_stride;
    Statistics is = statistics_of(x, columns, eps);
    float sum = 0.0f, products = 0.0f;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        float g = to_float(dy[column]) * stored_float(weight, weight_dtype, column);
        sum += g;
        products += g * (to_float(x[column]) - is.mean) * is.inverse;
    }
    float mean_g = block_sum(sum) / (float)columns, mean_gn = block_sum(products) / (float)columns;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        float g = to_float(dy[column]) * stored_float(weight, weight_dtype, column);
        float n = (to_float(x[column]) - is.mean) * is.inverse;
        float slope = is.inverse * (g - mean_g - n * mean_gn);
        dx[column] = to_act(addend != nullptr ? slope + to_float(addend[blockIdx.x * addend_stride + column]) : slope);
    }
}

// ── gradient with respect to the weight ──────────────────────────────────────────────────────────

// Block p sums dy n over `rows_per_partial` rows into row p of `partials` (P, C).
extern "C" __global__ void __launch_bounds__(256)
    layer_norm_weight_partials(const act *x, i64 x_stride, const act *dy, i64 dy_stride, float eps, float *partials,
                               int columns, int rows, int rows_per_partial) {
    const int first = blockIdx.x * rows_per_partial, last = min(first + rows_per_partial, rows);
    float *partial = partials + (i64)blockIdx.x * columns;
    for (int column = threadIdx.x; column < columns; column += blockDim.x)
        partial[column] = 0.0f;
    for (int row = first; row < last; ++row) {
        const act *own = x + row * x_stride, *slope = dy + row * dy_stride;
        Statistics is = statistics_of(own, columns, eps);
        for (int column = threadIdx.x; column < columns; column += blockDim.x)
            partial[column] += to_float(slope[column]) * ((to_float(own[column]) - is.mean) * is.inverse);
    }
}
