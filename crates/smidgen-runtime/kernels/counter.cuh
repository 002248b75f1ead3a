// Random numbers as functions of where they are used. Must match `counter.rs`: resumed runs rely on these values.

// SplitMix64's finalizer and lowbias32.
__device__ __forceinline__ u64 mix_64(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ u32 mix_32(u32 x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Combines a key with another number.
__device__ __forceinline__ u64 absorb(u64 key, u64 value) {
    const u64 golden = 0x9E3779B97F4A7C15ull;
    return mix_64(mix_64(value + golden) ^ (key + golden));
}

// 32 random bits for one channel of a row.
__device__ __forceinline__ u32 channel_bits(u64 key, u32 channel) {
    return mix_32(mix_32(channel ^ (u32)key) ^ (u32)(key >> 32));
}

