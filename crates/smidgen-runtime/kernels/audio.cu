// Kernels that copy rows between the audio encoder and the residual stream.
//
// Each thread handles one element; elements are numbered along the rows. `rows[a]` is the token of audio row a, or
// negative if it has none. No token appears twice.

// y = x; traffic 2 elements. Not launched if both are the same memory.
extern "C" __global__ void __launch_bounds__(256)
    copy_strided(const act *x, i64 x_stride, act *y, i64 y_stride, int columns, i64 elements) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= elements)
        return;
    i64 row = index / columns, column = index - row * columns;
    y[row * y_stride + column] = x[row * x_stride + column];
}

// y[rows[a]] = audio[a], or zero where `audio` is null; traffic 2 elements.
extern "C" __global__ void __launch_bounds__(256)
    place_rows(const act *audio, i64 audio_stride, const int *rows, act *y, i64 y_stride, int y_rows, int columns,
               i64 elements) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= elements)
        return;
    i64 row = index / columns, column = index - row * columns;
    int target = rows[row];
    if (target < 0)
        return;
    if (target >= y_rows)
        __trap();
    const float zeros[1] = {};
    act *to = y + (i64)target * y_stride + column;
    if (audio)
        *to = audio[row * audio_stride + column];
    else
        store_span<1, act>(to, zeros);
}

// y[a] = x[rows[a]], or zero if rows[a] is negative; traffic 2 elements.
extern "C" __global__ void __launch_bounds__(256)
    take_rows(const act *x, i64 x_stride, int x_rows, const int *rows, act *y, i64 y_stride, int columns,
              i64 elements) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= elements)
        return;
    i64 row = index / columns, column = index - row * columns;
    int source = rows[row];
    if (source >= x_rows)
        __trap();
    const float zeros[1] = {};
    act *to = y + row * y_stride + column;
    if (source < 0)
        store_span<1, act>(to, zeros);
    else
        *to = x[(i64)source * x_stride + column];
}
