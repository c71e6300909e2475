// Keys and values in pages.
//
// A page holds PAGE positions: keys [heads, PAGE, key_dim], then values [heads, PAGE, value_dim], or, where values are
// the last channels of their keys, keys alone.

#define PAGE 64

struct KvArgs {
    const u32* sequence; // [rows] of each row
    const u32* position; // [rows]
    u8* const* pages;    // [sequences, capacity]
    u32 capacity;        // the most pages per sequence
    u32 heads, key_dim, value_dim, latent;
    u32 single; // whether numbers are f32 instead of f16
    u32 window; // positions a query sees, or 0 for all
    u32 chunks; // whether these are the ones of its chunk, instead of the last ones

    // The first position that the last of `end` positions sees.
    __device__ inline u32 start(u32 end) const {
        if (!window) return 0;
        if (chunks) return (end - 1) / window * window;
        return end > window ? end - window : 0;
    }
};
