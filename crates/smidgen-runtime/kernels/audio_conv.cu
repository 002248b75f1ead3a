// Strided convolutions over the mel frames of a clip, and kernels that rearrange and mask audio rows.
//
// Marks (A, 4) hold for each audio row its number of mel frames, the begin and the end of its chunk, and the begin of
// its clip. Weights are a row of taps per channel, in their stored type. Neighbouring threads have neighbouring
// channels. Left out: gradients of the weights, which are never trained, and pointwise convolutions, which are linears.

#define MARK_COLUMNS 4
// Mel frames of an audio row.
#define FRAMES_OF_ROW 8

// A 3 x 3 convolution with a stride of 2 over frames and bins. x is (A, 2 · frames, 2 · bins, channels or 1) and y is
// (A, frames, bins, channels), both dense. The frame before the first one of a row is the last frame of the previous
// row, if that belongs to the same clip. Frames after the end of a clip and bins outside the spectrum count as zero.
// Grid: rows, frames, ceil(channels / 256). A thread keeps the taps of its channel for all bins.
extern "C" __global__ void __launch_bounds__(256)
    strided_conv(const act *x, const i32 *marks, const void *weight, int weight_dtype, const void *bias,
                 int bias_dtype, act *y, int frames, int bins, int channels, int depthwise) {
    int row = blockIdx.x, frame = blockIdx.y, channel = blockIdx.z * blockDim.x + threadIdx.x;
    if (channel >= channels)
        return;
    int in_frames = 2 * frames, in_bins = 2 * bins, in_channels = depthwise ? channels : 1;
    float w[9], start = stored_float(bias, bias_dtype, channel);
#pragma unroll
    for (int tap = 0; tap < 9; ++tap)
        w[tap] = stored_float(weight, weight_dtype, (i64)9 * channel + tap);
    const act *lines[3];
#pragma unroll
    for (int at = 0; at < 3; ++at) {
        int from_row = row, from_frame = 2 * frame + at - 1;
        bool exists = true;
        if (from_frame < 0) {
            exists = row > marks[MARK_COLUMNS * row + 3];
            from_row = row - 1;
            from_frame = in_frames - 1;
        }
        if (exists) {
            int sounding = ceil_div(marks[MARK_COLUMNS * from_row] * in_frames, FRAMES_OF_ROW);
            exists = from_frame < sounding;
        }
        i64 line = ((i64)from_row * in_frames + from_frame) * in_bins;
        lines[at] = exists ? x + line * in_channels + (depthwise ? channel : 0) : nullptr;
    }
    act *to = y + (((i64)row * frames + frame) * bins) * channels + channel;
    for (int bin = 0; bin < bins; ++bin) {
        float sum = start;
#pragma unroll
        for (int tap = 0; tap < 9; ++tap) {
            int from_bin = 2 * bin + tap % 3 - 1;
            if (lines[tap / 3] != nullptr && from_bin >= 0 && from_bin < in_bins)
                sum += w[tap] * to_float(lines[tap / 3][(i64)from_bin * in_channels]);
        }
        to[(i64)bin * channels] = to_act(sum);
    }
}

// y (A, C · places) from x (A · places, C): y[a, c · places + p] = x[a · places + p, c]. One element per thread.
extern "C" __global__ void __launch_bounds__(256)
    join_places(const act *x, i64 x_stride, act *y, i64 y_stride, int places, int columns, i64 elements) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= elements)
        return;
    i64 row = index / columns;
    int column = (int)(index - row * columns), channel = column / places;
    y[row * y_stride + column] = x[(row * places + (column - channel * places)) * x_stride + channel];
}

// y = x, with zeros in rows without frames. y may be x.
template <typename T>
__device__ __forceinline__ void mask(const act *x, i64 x_stride, const i32 *marks, T *y, i64 y_stride, int columns,
                                     i64 elements) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= elements)
        return;
    i64 row = index / columns, column = index - row * columns;
    float value = to_float(x[row * x_stride + column]);
    y[row * y_stride + column] = from_float<T>(marks[MARK_COLUMNS * row] == 0 ? 0.0f : value);
}

extern "C" __global__ void __launch_bounds__(256)
    mask_rows(const act *x, i64 x_stride, const i32 *marks, act *y, i64 y_stride, int columns, i64 elements) {
    mask<act>(x, x_stride, marks, y, y_stride, columns, elements);
}

// The same in f32, for the host.
extern "C" __global__ void __launch_bounds__(256)
    mask_rows_stored(const act *x, i64 x_stride, const i32 *marks, float *y, i64 y_stride, int columns,
                     i64 elements) {
    mask<float>(x, x_stride, marks, y, y_stride, columns, elements);
}
