// What products with rows one by one are told, whichever way they are computed.

struct MatvecArgs {
    Mat w[MOST_PRODUCTS];
    float* out[MOST_PRODUCTS];
    const float* bias[MOST_PRODUCTS]; // [experts, rows], if there are any
    u32 blocks[MOST_PRODUCTS];        // where each matrix's blocks end
    u32 width[MOST_PRODUCTS];         // floats from one row of an output to the next
    const float* x;
    u32 x_width;
    u32 share;          // so many outputs read the same row of x
    const u32* experts; // of each output, if the matrices are experts'
    PriorNorm norm;     // where there is one row of x, of whole groups
    u32 turns;          // rows of a warp, or sixteens of rows of a block where it has one row of x
    u32 ahead;          // whether all weights are asked for at once: the device's cache has room for them
};

struct GateUpArgs {
    Mat gate, up;
    const float* gate_bias; // [experts, inner], or none
    const float* up_bias;
    const float* x;
    float* out; // [pairs, inner]
    u32 x_width;
    u32 share;
    const u32* experts; // of each pair, or none
    float alpha, limit; // of the clamped activation; a limit of 0 is none
    u32 turns;          // rows of a warp, or eights of rows of a block where it has one row of x
    u32 ahead;          // whether all weights are asked for at once, those of the next product too
    Mat next;
};
