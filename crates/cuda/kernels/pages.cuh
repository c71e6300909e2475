// Keys and values in pages.
//
// A page holds PAGE positions: keys [heads, PAGE, key_dim], then values [heads, PAGE, value_dim], or, where values are
// the last channels of their keys, keys alone.

#define PAGE 64

struct KvArgs {
    const u32* sequence; // [rows] which each row belongs to
    const u32* position; // [rows]
    u8* const* pages;    // [sequences, capacity]
    u32 capacity;        // pages that there is room for
    u32 heads, key_dim, value_dim, latent;
    u32 single; // whether numbers are single precision and not halves
};
