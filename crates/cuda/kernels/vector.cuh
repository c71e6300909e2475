// The arguments of products of single rows, for all kernels that compute them.

struct MatvecArgs {
    Mat w[MOST_PRODUCTS];
    float* out[MOST_PRODUCTS];
    const float* bias[MOST_PRODUCTS]; // [experts, rows], or null
    u32 blocks[MOST_PRODUCTS];        // where each matrix's blocks end
    u32 width[MOST_PRODUCTS];         // floats from one row of an output to the next
    const float* x;
    u32 x_width;
    u32 share;          // how many outputs read the same row of x
    const u32* experts; // of each output, if the matrices are experts'
    PriorNorm norm;     // if there is one row of x, of whole groups
    u32 turns;          // rows of a warp, or tiles of 16 rows of a block if there is one row of x
    u32 ahead;          // whether all weights are prefetched at once, because the cache can hold them
};

struct GateUpArgs {
    Mat gate, up;
    const float* gate_bias; // [experts, inner], or null
    const float* up_bias;
    const float* x;
    float* out; // [pairs, inner]
    u32 x_width;
    u32 share;
    const u32* experts; // of each pair, or null
    Activation activation;
    u32 turns;          // rows of a warp, or tiles of 8 rows of a block if there is one row of x
    u32 ahead;          // whether all weights are prefetched at once, including the next product's
    Mat next;
};
