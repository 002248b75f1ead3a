// Root-mean-square norms over groups of D of a row's C channels, and their gradients.
//
// Forward:   r = 1 / sqrt(mean(x²) + eps)     y = x r w
// Backward:  dw = Σ dy x r over all groups. Let g = dy w be the gradient of x r. x_j changes y_j directly, and every y_i
//            through r, with dr/dx_j = -r³ x_j / D, so
//            dx_j = r g_j - (Σ_i g_i x_i) r³ x_j / D,  that is  dx = r (g - x r² mean(g x))
// r is recomputed from x, never stored. The launcher chooses one of four forms: `_heads` uses 1 to 32 lanes for a group
// of at most 256 channels; `_two` and `_four` use a block whose threads keep 2 or 4 times eight channels in registers
// between the two passes; `_any` reads the group twice, element by element, if it is wide or not aligned. Traffic in
// elements: forward 2, gradient 3 or, with an addend, 4.
// The `_round_` forms, for rows of one group, also round what they write to fp8; the bits are the same as those of a
// separate rounding kernel.
// Outputs may be inputs: all reads of a group precede its writes, or the same thread reads and writes an element.
// The order of sums depends only on the sizes.

// The offset of group `index` in the matrix. The groups of a row are adjacent.
__device__ __forceinline__ i64 group_offset(u32 index, int groups, int columns, i64 stride) {
    u32 row = index / (u32)groups;
    return (i64)row * stride + (i64)(index - row * (u32)groups) * columns;
}

__device__ __forceinline__ float inverse_rms(float squares, int columns, float eps) {
    return 1.0f / sqrtf(squares / (float)columns + eps);
}

__device__ __forceinline__ float squares_of(const float (&x)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        sum += x[i] * x[i];
    return sum;
}

// A norm without a weight has a null pointer, and a shift of 1.
__device__ __forceinline__ void weight_eight(const void *weight, int dtype, float shift, int index, float (&w)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        w[i] = 0.0f;
    if (weight != nullptr)
        stored_eight(weight, dtype, index, w);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        w[i] += shift;
}

__device__ __forceinline__ float weight_one(const void *weight, int dtype, float shift, int index) {
    return (weight != nullptr ? stored_float(weight, dtype, index) : 0.0f) + shift;
}

// ── forward ──────────────────────────────────────────────────────────────────────────────────────

template <int V, bool ROUNDS>
__device__ __forceinline__ void normalise_in_registers(const RoundedRows &to, const act *x, i64 x_stride, const void *weight, int dtype,
                                                       float shift, float eps, act *y, i64 y_stride, int columns,
                                                       int groups) {
    start_next();
    await_previous();
    x += group_offset(blockIdx.x, groups, columns, x_stride);
    y += group_offset(blockIdx.x, groups, columns, y_stride);
    Eight<act> held[V];
    float w[V][8];
#pragma unroll
    for (int k = 0; k < V; ++k) {
        int first = 8 * (threadIdx.x + k * blockDim.x);
        held[k] = first < columns ? read_eight<act>(x + first) : Eight<act>{};
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
        int first = 8 * (threadIdx.x + k * blockDim.x);
        if (first < columns)
            weight_eight(weight, dtype, shift, first, w[k]);
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        float value[8];
        unpack<act>(held[k], value);
        squares += squares_of(value);
    }
    float r = inverse_rms(block_sum(squares), columns, eps);
#pragma unroll
    for (int k = 0; k < V; ++k) {
        int first = 8 * (threadIdx.x + k * blockDim.x);
        if (first < columns) {
            float value[8];
            unpack<act>(held[k], value);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                value[i] = value[i] * r * w[k][i];
            held[k] = pack<act>(value);
            write_eight<act>(y + first, held[k]);
        }
    }
    if constexpr (ROUNDS)
        round_held(to, held, columns);
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_two(const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps, act *y,
                 i64 y_stride, int columns, int groups) {
    normalise_in_registers<2, false>({}, x, x_stride, weight, dtype, shift, eps, y, y_stride, columns, groups);
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_four(const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps, act *y,
                  i64 y_stride, int columns, int groups) {
    normalise_in_registers<4, false>({}, x, x_stride, weight, dtype, shift, eps, y, y_stride, columns, groups);
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_round_two(RoundedRows to, const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps,
                       act *y, i64 y_stride, int columns, int groups) {
    normalise_in_registers<2, true>(to, x, x_stride, weight, dtype, shift, eps, y, y_stride, columns, groups);
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_round_four(RoundedRows to, const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps,
                        act *y, i64 y_stride, int columns, int groups) {
    normalise_in_registers<4, true>(to, x, x_stride, weight, dtype, shift, eps, y, y_stride, columns, groups);
}

extern "C" __global__ void __launch_bounds__(256)
    rms_norm_heads(const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps, act *y,
                   i64 y_stride, int columns, int groups, u32 all_groups, int lanes) {
    start_next();
    await_previous();
    u32 apart = blockDim.x / lanes;
    u32 index = blockIdx.x * 2 * apart + threadIdx.x / lanes;
    int first = 8 * (threadIdx.x % lanes);
    Eight<act> held[2];
    float w[8];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 group = index + k * apart;
        bool here = group < all_groups && first < columns;
        held[k] = here ? read_eight<act>(x + group_offset(group, groups, columns, x_stride) + first) : Eight<act>{};
    }
    if (first < columns)
        weight_eight(weight, dtype, shift, first, w);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        u32 group = index + k * apart;
        float value[8];
        unpack<act>(held[k], value);
        float r = inverse_rms(lanes_sum(squares_of(value), lanes), columns, eps);
        if (group < all_groups && first < columns) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                value[i] = value[i] * r * w[i];
            store_eight<act>(y + group_offset(group, groups, columns, y_stride) + first, value);
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_any(const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps, act *y,
                 i64 y_stride, int columns, int groups) {
    start_next();
    await_previous();
    x += group_offset(blockIdx.x, groups, columns, x_stride);
    y += group_offset(blockIdx.x, groups, columns, y_stride);
    float squares = 0.0f;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        float value = to_float(x[column]);
        squares += value * value;
    }
    float r = inverse_rms(block_sum(squares), columns, eps);
    for (int column = threadIdx.x; column < columns; column += blockDim.x)
        y[column] = to_act(to_float(x[column]) * r * weight_one(weight, dtype, shift, column));
}

// ── gradient with respect to x ───────────────────────────────────────────────────────────────────
// `addend` may be null.

// dx, where `pull` is r² mean(g x).
__device__ __forceinline__ void norm_slope(const float (&x)[8], const float (&dy)[8], const float (&w)[8], float r,
                                           float pull, float (&dx)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        dx[i] = r * (dy[i] * w[i] - x[i] * pull);
}

__device__ __forceinline__ float products_of(const float (&x)[8], const float (&dy)[8], const float (&w)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        sum += dy[i] * w[i] * x[i];
    return sum;
}

template <int V, bool ROUNDS>
__device__ __forceinline__ void slope_in_registers(const RoundedRows &to, const act *x, i64 x_stride, const void *weight, int dtype,
                                                   float shift, float eps, const act *dy, i64 dy_stride,
                                                   const act *addend, i64 addend_stride, act *dx, i64 dx_stride,
                                                   int columns, int groups) {
    x += group_offset(blockIdx.x, groups, columns, x_stride);
    dy += group_offset(blockIdx.x, groups, columns, dy_stride);
    dx += group_offset(blockIdx.x, groups, columns, dx_stride);
    bool adds = addend != nullptr;
    if (adds)
        addend += group_offset(blockIdx.x, groups, columns, addend_stride);
    Eight<act> held_x[V], held_dy[V], held_addend[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
        int first = 8 * (threadIdx.x + k * blockDim.x);
        bool here = first < columns;
        held_x[k] = here ? read_eight<act>(x + first) : Eight<act>{};
        held_dy[k] = here ? read_eight<act>(dy + first) : Eight<act>{};
        held_addend[k] = here && adds ? read_eight<act>(addend + first) : Eight<act>{};
    }
    float squares = 0.0f, products = 0.0f;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        int first = 8 * (threadIdx.x + k * blockDim.x);
        if (first < columns) {
            float value[8], slope[8], w[8];
            unpack<act>(held_x[k], value);
            unpack<act>(held_dy[k], slope);
            weight_eight(weight, dtype, shift, first, w);
            squares += squares_of(value);
            products += products_of(value, slope, w);
        }
    }
    squares = block_sum(squares);
    products = block_sum(products);
    float r = inverse_rms(squares, columns, eps);
    float pull = r * r * (products / (float)columns);
#pragma unroll
    for (int k = 0; k < V; ++k) {
        int first = 8 * (threadIdx.x + k * blockDim.x);
        if (first < columns) {
            float value[8], slope[8], w[8], out[8], more[8];
            unpack<act>(held_x[k], value);
            unpack<act>(held_dy[k], slope);
            unpack<act>(held_addend[k], more);
            // Loaded again: it is in the L1 cache, and registers limit the number of resident blocks.
            weight_eight(weight, dtype, shift, first, w);
            norm_slope(value, slope, w, r, pull, out);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                out[i] += more[i];
            held_dy[k] = pack<act>(out);
            write_eight<act>(dx + first, held_dy[k]);
        }
    }
    if constexpr (ROUNDS)
        round_held(to, held_dy, columns);
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_grad_two(const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps,
                      const act *dy, i64 dy_stride, const act *addend, i64 addend_stride, act *dx, i64 dx_stride,
                      int columns, int groups) {
    slope_in_registers<2, false>({}, x, x_stride, weight, dtype, shift, eps, dy, dy_stride, addend, addend_stride, dx,
                                 dx_stride, columns, groups);
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_grad_four(const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps,
                       const act *dy, i64 dy_stride, const act *addend, i64 addend_stride, act *dx, i64 dx_stride,
                       int columns, int groups) {
    slope_in_registers<4, false>({}, x, x_stride, weight, dtype, shift, eps, dy, dy_stride, addend, addend_stride, dx,
                                 dx_stride, columns, groups);
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_grad_round_two(RoundedRows to, const act *x, i64 x_stride, const void *weight, int dtype, float shift,
                            float eps, const act *dy, i64 dy_stride, const act *addend, i64 addend_stride, act *dx,
                            i64 dx_stride, int columns, int groups) {
    slope_in_registers<2, true>(to, x, x_stride, weight, dtype, shift, eps, dy, dy_stride, addend, addend_stride, dx,
                                dx_stride, columns, groups);
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_grad_round_four(RoundedRows to, const act *x, i64 x_stride, const void *weight, int dtype, float shift,
                             float eps, const act *dy, i64 dy_stride, const act *addend, i64 addend_stride, act *dx,
                             i64 dx_stride, int columns, int groups) {
    slope_in_registers<4, true>(to, x, x_stride, weight, dtype, shift, eps, dy, dy_stride, addend, addend_stride, dx,
                                dx_stride, columns, groups);
}

extern "C" __global__ void __launch_bounds__(256)
    rms_norm_grad_heads(const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps,
                        const act *dy, i64 dy_stride, const act *addend, i64 addend_stride, act *dx, i64 dx_stride,
                        int columns, int groups, u32 all_groups, int lanes) {
    u32 group = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    int first = 8 * (threadIdx.x % lanes);
    bool here = group < all_groups && first < columns;
    float value[8] = {}, slope[8] = {}, more[8] = {}, w[8] = {}, out[8];
    if (here) {
        load_eight<act>(x + group_offset(group, groups, columns, x_stride) + first, value);
        load_eight<act>(dy + group_offset(group, groups, columns, dy_stride) + first, slope);
        if (addend != nullptr)
            load_eight<act>(addend + group_offset(group, groups, columns, addend_stride) + first, more);
        weight_eight(weight, dtype, shift, first, w);
    }
    float r = inverse_rms(lanes_sum(squares_of(value), lanes), columns, eps);
    float pull = r * r * (lanes_sum(products_of(value, slope, w), lanes) / (float)columns);
    norm_slope(value, slope, w, r, pull, out);
    if (here) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            out[i] += more[i];
        store_eight<act>(dx + group_offset(group, groups, columns, dx_stride) + first, out);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_grad_any(const act *x, i64 x_stride, const void *weight, int dtype, float shift, float eps,
                      const act *dy, i64 dy_stride, const act *addend, i64 addend_stride, act *dx, i64 dx_stride,
                      int columns, int groups) {
    x += group_offset(blockIdx.x, groups, columns, x_stride);
    dy += group_offset(blockIdx.x, groups, columns, dy_stride);
    dx += group_offset(blockIdx.x, groups, columns, dx_stride);
    if (addend != nullptr)
        addend += group_offset(blockIdx.x, groups, columns, addend_stride);
    float squares = 0.0f, products = 0.0f;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        float value = to_float(x[column]);
        squares += value * value;
        products += to_float(dy[column]) * weight_one(weight, dtype, shift, column) * value;
    }
    squares = block_sum(squares);
    products = block_sum(products);
    float r = inverse_rms(squares, columns, eps);
    float pull = r * r * (products / (float)columns);
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        float w = weight_one(weight, dtype, shift, column);
        float slope = r * (to_float(dy[column]) * w - to_float(x[column]) * pull);
        dx[column] = to_act(addend != nullptr ? slope + to_float(addend[column]) : slope);
    }
}

// ── gradient with respect to the weight ──────────────────────────────────────────────────────────
// Block p sums `groups_per_partial` of the `all_groups` groups into row p of `partials` (P, D). `add_partial_rows` then
// adds these rows to the gradient. Traffic: 2 elements, and the partial sums.

// The next group is loaded while the current one is reduced.
template <int V>
__device__ __forceinline__ void weight_in_registers(const act *x, i64 x_stride, const act *dy, i64 dy_stride,
                                                    float eps, float *partials, int columns, int groups,
                                                    u32 all_groups, u32 groups_per_partial) {
    u32 group = blockIdx.x * groups_per_partial;
    u32 end = min(group + groups_per_partial, all_groups);
    float sum[V][8] = {};
    Eight<act> held_x[V], held_dy[V];
#pragma unroll
    for (int k = 0; k < V; ++k) {
        int first = 8 * (threadIdx.x + k * blockDim.x);
        bool here = first < columns && group < end;
        held_x[k] = here ? read_eight<act>(x + group_offset(group, groups, columns, x_stride) + first) : Eight<act>{};
        held_dy[k] =
            here ? read_eight<act>(dy + group_offset(group, groups, columns, dy_stride) + first) : Eight<act>{};
    }
    for (; group < end; ++group) {
        Eight<act> next_x[V], next_dy[V];
        i64 x_offset = group_offset(group + 1, groups, columns, x_stride);
        i64 dy_offset = group_offset(group + 1, groups, columns, dy_stride);
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < V; ++k) {
            int first = 8 * (threadIdx.x + k * blockDim.x);
            bool here = first < columns && group + 1 < end;
            next_x[k] = here ? read_eight<act>(x + x_offset + first) : Eight<act>{};
            next_dy[k] = here ? read_eight<act>(dy + dy_offset + first) : Eight<act>{};
            float value[8];
            unpack<act>(held_x[k], value);
            squares += squares_of(value);
        }
        float r = inverse_rms(block_sum(squares), columns, eps);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            float value[8], slope[8];
            unpack<act>(held_x[k], value);
            unpack<act>(held_dy[k], slope);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                sum[k][i] += slope[i] * (value[i] * r);
            held_x[k] = next_x[k];
            held_dy[k] = next_dy[k];
        }
    }
    float *partial = partials + (i64)blockIdx.x * columns;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        int first = 8 * (threadIdx.x + k * blockDim.x);
        if (first < columns)
            store_eight<float>(partial + first, sum[k]);
    }
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_weight_partials_two(const act *x, i64 x_stride, const act *dy, i64 dy_stride, float eps,
                                 float *partials, int columns, int groups, u32 all_groups,
                                 u32 groups_per_partial) {
    weight_in_registers<2>(x, x_stride, dy, dy_stride, eps, partials, columns, groups, all_groups,
                           groups_per_partial);
}

extern "C" __global__ void __launch_bounds__(512)
    rms_norm_weight_partials_four(const act *x, i64 x_stride, const act *dy, i64 dy_stride, float eps,
                                  float *partials, int columns, int groups, u32 all_groups,
                                  u32 groups_per_partial) {
    weight_in_registers<4>(x, x_stride, dy, dy_stride, eps, partials, columns, groups, all_groups,
                           groups_per_partial);
}

// Teams of `lanes` lanes take turns over the block's groups. The sums are added in the order of the teams.
extern "C" __global__ void __launch_bounds__(256)
    rms_norm_weight_partials_heads(const act *x, i64 x_stride, const act *dy, i64 dy_stride, float eps,
                                   float *partials, int columns, int groups, u32 all_groups,
                                   u32 groups_per_partial, int lanes) {
    __shared__ float team_sums[256 * 8];
    int teams = blockDim.x / lanes;
    int team = threadIdx.x / lanes;
    int first = 8 * (threadIdx.x % lanes);
    u32 begin = blockIdx.x * groups_per_partial;
    u32 end = min(begin + groups_per_partial, all_groups);
    float sum[8] = {};
    // The bound is the same for all teams, because every lane of a warp has to take part in the reduction.
#pragma unroll 2
    for (u32 base = begin; base < end; base += teams) {
        u32 group = base + team;
        float value[8] = {}, slope[8] = {};
        if (group < end && first < columns) {
            load_eight<act>(x + group_offset(group, groups, columns, x_stride) + first, value);
            load_eight<act>(dy + group_offset(group, groups, columns, dy_stride) + first, slope);
        }
        float r = inverse_rms(lanes_sum(squares_of(value), lanes), columns, eps);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            sum[i] += slope[i] * (value[i] * r);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        team_sums[8 * threadIdx.x + i] = sum[i];
    __syncthreads();
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        float total = 0.0f;
        for (int other = 0; other < teams; ++other)
            total += team_sums[8 * lanes * other + column];
        partials[(i64)blockIdx.x * columns + column] = total;
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_weight_partials_any(const act *x, i64 x_stride, const act *dy, i64 dy_stride, float eps,
                                 float *partials, int columns, int groups, u32 all_groups,
                                 u32 groups_per_partial) {
    u32 group = blockIdx.x * groups_per_partial;
    u32 end = min(group + groups_per_partial, all_groups);
    float *partial = partials + (i64)blockIdx.x * columns;
    for (int column = threadIdx.x; column < columns; column += blockDim.x)
        partial[column] = 0.0f;
    for (; group < end; ++group) {
        const act *x_group = x + group_offset(group, groups, columns, x_stride);
        const act *dy_group = dy + group_offset(group, groups, columns, dy_stride);
        float squares = 0.0f;
        for (int column = threadIdx.x; column < columns; column += blockDim.x) {
            float value = to_float(x_group[column]);
            squares += value * value;
        }
        float r = inverse_rms(block_sum(squares), columns, eps);
        for (int column = threadIdx.x; column < columns; column += blockDim.x)
            partial[column] += to_float(dy_group[column]) * (to_float(x_group[column]) * r);
    }
}
