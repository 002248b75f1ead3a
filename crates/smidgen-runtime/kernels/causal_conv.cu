// Depthwise convolutions over the rows before a row: of a sample, of a chunk of sound, or of a sequence that grows.
//
// Weights are a row of taps per channel, in their stored type. Neighbouring threads have neighbouring channels. A row that
// belongs to another sample or chunk counts as zero.

#define MARK_COLUMNS 4

// The rows that `row` may see: those of its sample by the boundaries of all samples, or of its chunk by its marks.
__device__ __forceinline__ void reach_of(const i32 *reach, int samples, int row, int &begin, int &end) {
    if (samples == 0) {
        begin = reach[MARK_COLUMNS * row + 1];
        end = reach[MARK_COLUMNS * row + 2];
        return;
    }
    int low = 0, high = samples;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (reach[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    begin = reach[low];
    end = reach[low + 1];
}

// Forward: y[t] = bias + Σ_j w[j] x[t - K + 1 + j]. Backward: x[t] is read by the outputs t to t + K - 1, so
// dx[t] = Σ_j w[j] dy[t + K - 1 - j]. Grid: rows, ceil(columns / 256).
extern "C" __global__ void __launch_bounds__(256)
    causal_conv(const act *x, i64 x_stride, const i32 *reach, int samples, const void *weight, int weight_dtype,
                const void *bias, int bias_dtype, act *y, i64 y_stride, int columns, int taps, int backward) {
    const int row = blockIdx.x, channel = blockIdx.y * blockDim.x + threadIdx.x;
    if (channel >= columns)
        return;
    int begin, end;
    reach_of(reach, samples, row, begin, end);
    float sum = bias == nullptr ? 0.0f : stored_float(bias, bias_dtype, channel);
    for (int tap = 0; tap < taps; ++tap) {
        const int from = backward ? row + taps - 1 - tap : row - taps + 1 + tap;
        if (from >= begin && from < end)
            sum += stored_float(weight, weight_dtype, (i64)channel * taps + tap) *
                   to_float(x[from * x_stride + channel]);
    }
    y[row * y_stride + channel] = to_act(sum);
}

// dw[c, j] += Σ dy[t, c] x[t - K + 1 + j, c]. A block sums the rows of 32 channels and one tap: 8 warps take turns, and
// their sums are added in order. Grid: ceil(columns / 32), taps.
extern "C" __global__ void __launch_bounds__(256)
    causal_conv_weight_grad(const act *x, i64 x_stride, const act *dy, i64 dy_stride, const i32 *boundaries,
                            int samples, float *dw, int columns, int taps) {
    __shared__ float sums[8][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int channel = blockIdx.x * WARP + lane, tap = blockIdx.y, lag = taps - 1 - tap;
    float sum = 0.0f;
    if (channel < columns)
        for (int sample = 0; sample < samples; ++sample)
            for (int row = boundaries[sample] + lag + warp; row < boundaries[sample + 1]; row += 8)
                sum += to_float(dy[row * dy_stride + channel]) * to_float(x[(row - lag) * x_stride + channel]);
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || channel >= columns)
        return;
    for (int other = 1; other < 8; ++other)
        sum += sums[other][lane];
    dw[(i64)channel * taps + tap] += sum;
}

// The convolution of new tokens. Tokens of a slot are neighbours; the K - 1 rows before them are in its row of `windows`,
// (L, (K - 1) · columns), which then gets the last ones of the longer sequence. A thread has one channel of all tokens.
// Grid: ceil(columns / 256).
extern "C" __global__ void __launch_bounds__(256)
    cached_conv(const act *x, i64 x_stride, const void *weight, int weight_dtype, const void *bias, int bias_dtype,
                const i32 *slots, const i32 *positions, float *windows, act *y, i64 y_stride, int rows, int columns,
                int taps) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x, lags = taps - 1;
    if (channel >= columns)
        return;
    const float start = bias == nullptr ? 0.0f : stored_float(bias, bias_dtype, channel);
    for (int first = 0, end; first < rows; first = end) {
        for (end = first + 1; end < rows && slots[end] == slots[first];)
            ++end;
        float *window = windows + (i64)slots[first] * lags * columns + channel;
        const bool begins = positions[first] == 0;
        for (int row = first; row < end; ++row) {
            float sum = start;
            for (int tap = 0; tap < taps; ++tap) {
                const int from = row - lags + tap;
                float value = 0.0f;
                if (from >= first)
                    value = to_float(x[from * x_stride + channel]);
                else if (!begins)
                    value = window[(i64)(from - first + lags) * columns];
                sum += stored_float(weight, weight_dtype, (i64)channel * taps + tap) * value;
            }
            y[row * y_stride + channel] = to_act(sum);
        }
        // Each row moves to an earlier place, so none is overwritten before it is read.
        for (int at = 0; at < lags; ++at) {
            const int from = end - lags + at;
            float value = 0.0f;
            if (from >= first)
                value = to_float(x[from * x_stride + channel]);
            else if (!begins)
                value = window[(i64)(from - first + lags) * columns];
            window[(i64)at * columns] = value;
        }
    }
}
