// The 8-bit dynamic maps of bitsandbytes, computed at compile time in the same way as in `quant/dynamic_map.rs`. For
// each e = 0..=6, [0.1, 1] is divided into equal steps, and their midpoints times 10^(e - 6) are values of the map,
// with both signs; 0 and 1 are values too. The unsigned map has twice as many steps. This text is prepended to the
// kernel files that need it; it has no kernel.

struct DynamicMap {
    float at[256];
};

// The product is exact in f64, so this rounds as a fused multiply-add in f32 does.
constexpr float dynamic_boundary(int index, int intervals) {
    const double step = (double)((1.0f - 0.1f) / (float)intervals);
    return index < (intervals + 1) / 2 ? (float)((double)0.1f + step * (double)index)
                                       : (float)((double)1.0f - step * (double)(intervals - index));
}

constexpr DynamicMap dynamic_map(bool with_signs) {
    const float powers[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    DynamicMap map = {};
    int place = 0;
    for (int exponent = 0; exponent < 7; ++exponent) {
        const int items = (with_signs ? 1 : 2) << exponent;
        for (int item = 0; item < items; ++item) {
            const float middle = (dynamic_boundary(item, items) + dynamic_boundary(item + 1, items)) / 2.0f;
            const float value = powers[exponent] * middle;
            if (with_signs) {
                map.at[128 + place] = value;
                map.at[126 - place] = -value;
            } else {
                map.at[1 + place] = value;
            }
            ++place;
        }
    }
    map.at[255] = 1.0f;
    return map;
}

// Entry 127 is 0, entry 255 is 1.
__device__ const DynamicMap signed_map = dynamic_map(true);
