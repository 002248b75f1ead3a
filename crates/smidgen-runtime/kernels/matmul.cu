// Kernels around matmuls: copying rows to another stride, writing a bias to every row, and random numbers for timing.

// Copies (rows, columns) to another stride and zeros the columns from `columns` to `padded`. The ranges do not overlap.
extern "C" __global__ void copy_rows(const act *from, i64 from_stride, act *to, i64 to_stride, int rows, int columns,
                                     int padded) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 row = index / padded;
    int column = (int)(index % padded);
    if (row < rows)
        to[row * to_stride + column] = column < columns ? from[row * from_stride + column] : to_act(0.0f);
}

// Copies `columns` columns of each of `groups` equal parts of a row, and zeros those from `columns` to `padded`. Groups are
// `from_group` columns apart in the source and `to_group` in the target. The ranges do not overlap.
extern "C" __global__ void copy_groups(const act *from, i64 from_stride, int from_group, act *to, i64 to_stride,
                                       int to_group, int rows, int groups, int columns, int padded) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 line = index / padded, row = line / groups;
    int column = (int)(index % padded), group = (int)(line % groups);
    if (row < rows)
        to[row * to_stride + group * to_group + column] =
            column < columns ? from[row * from_stride + group * from_group + column] : to_act(0.0f);
}

// Writes a stored vector to every row.
extern "C" __global__ void broadcast_row(const void *stored, int dtype, act *to, i64 stride, int rows, int columns) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns)
        return;
    act value = to_act(stored_float(stored, dtype, column));
    for (int row = blockIdx.y; row < rows; row += gridDim.y)
        to[row * stride + column] = value;
}

// Random numbers between -1 and 1, which look like activations in all three types. Matmuls are timed on them, because
// zeros would multiply faster than the data of a run.
extern "C" __global__ void fill_with_noise(u32 *words, u64 count) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        u32 x = (u32)(i ^ (i >> 32)) * 0x9e3779b1u;
        x = (x ^ (x >> 15)) * 0x85ebca77u;
        x ^= x >> 13;
        // A random sign and mantissa, and an exponent for values just below 1, in both halves of the word: this works
        // for bf16 and for f32.
        words[i] = (x & 0x807f807fu) | 0x3e003e00u;
    }
}
