// How weights are multiplied with a few rows of activations, on the tensor cores.
//
// Weights go from memory to the tensor cores through registers alone. A warp has 16 rows of a matrix and passes over
// their columns in strips of 256. The tensor cores need rows to be shared by four lanes. Each lane has those 64 columns
// of a strip whose codes are stored together. The order in which columns are added does not matter, as long as the
// activations have the same order. Activations are converted to f16 on their way to shared memory.

#define THREADS 256
#define WARPS (THREADS / WARP)
#define STRIP 256
// Groups of eight columns in a strip.
#define EIGHTS (STRIP / 8)

// Masks for nibbles, and twice 1024 as f16. The compiler would load a constant anew each time, in a separate
// instruction. It does not know that threadIdx.y is 0.
#define LOW_NIBBLE (0x000f000fu + threadIdx.y)
#define HIGH_NIBBLE (0x00f000f0u + threadIdx.y)
#define KEPT_1024 (0x64006400u + threadIdx.y)

// A number twice, as two f16 in a word; and numbers as f16.
#define TWICE(half) (0x00010001u * (half))
#define HALF_1024 0x6400u
#define MINUS_1024 TWICE(0xe400u)
#define MINUS_1056 TWICE(0xe420u)
#define MINUS_1152 TWICE(0xe480u)
#define MINUS_64 TWICE(0xd400u)
#define MINUS_96 TWICE(0xd600u)
#define SIXTEENTH TWICE(0x2c00u)

// Sums of 32 activations are stored as two f16 after division by this, so that they fit.
#define SUM_SCALE 32.0f

// Where a group of eight columns is in shared memory. The four that lanes read at the same time are in different banks.
__device__ inline u32 place(u32 eight) { return eight ^ (eight >> 2 & 6); }

// Activations in shared memory, as one lane sees them: its token in each group of eight.
struct Activations {
    const uint4* eights; // halves in the order 0 2 1 3, 4 6 5 7
    const uint2* sums;   // of every 32: two sums' upper halves, then their lower ones
    u32 stride, sums_stride;

    __device__ inline uint4 eight(int tile, u32 index) const { return eights[8 * tile * stride + place(index)]; }
    __device__ inline uint2 two_sums(int tile, u32 index) const { return sums[8 * tile * sums_stride + index]; }
};

// Multiplies eight columns of the lane's two rows of weights, in the order of the activations.
template <int TILES>
__device__ inline void multiply_eight(float (&d)[TILES][4], const u32 (&lower)[4], const u32 (&upper)[4],
                                      const Activations& x, u32 index) {
    u32 first[4] = {lower[0], upper[0], lower[1], upper[1]}, second[4] = {lower[2], upper[2], lower[3], upper[3]};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        uint4 eight = x.eight(tile, index);
        u32 these[2] = {eight.x, eight.y}, those[2] = {eight.z, eight.w};
        multiply_add(d[tile], first, these);
        multiply_add(d[tile], second, those);
    }
}

// A lane's part of a row of a strip, and how it is multiplied. Any type of weights can be unpacked to floats first.
template <u32 KIND> struct Share {
    static const int TIMES = 1;
    struct Raw {
        typename Unpack<KIND>::Raw group[2];
    };
    static __device__ inline u32 group_of(const Mat& m, u32 strip, u32 part, int i) {
        // Groups beyond the last repeat it, and are multiplied by zero.
        return min(8 * strip + 2 * part + i, (m.cols - 1) / 32);
    }
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 strip, u32 part) {
        return Raw{{Unpack<KIND>::load(m, r, group_of(m, strip, part, 0)),
                    Unpack<KIND>::load(m, r, group_of(m, strip, part, 1))}};
    }
    static __device__ inline void halves(const Mat& m, const Raw& raw, u32 index, int i, u32 (&words)[16]) {
        Group g;
        Unpack<KIND>::unpack(m, raw.group[i], index, g);
#pragma unroll
        for (int j = 0; j < 32; j += 4) {
            float scale = g.scale[j / 16], min = g.min[j / 16];
            words[j / 2] = two_halves(fmaf(scale, g.lane[j], -min), fmaf(scale, g.lane[j + 2], -min));
            words[j / 2 + 1] = two_halves(fmaf(scale, g.lane[j + 1], -min), fmaf(scale, g.lane[j + 3], -min));
        }
    }
    template <int TILES>
    static __device__ inline void multiply(const Mat& m, const Raw& lower, const Raw& upper, u32 strip, u32 part,
                                           const Activations& x, float (&sum)[TILES][4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 low[16], high[16], index = group_of(m, strip, part, i);
            halves(m, lower, index, i, low);
            halves(m, upper, index, i, high);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 l[4] = {low[4 * j], low[4 * j + 1], low[4 * j + 2], low[4 * j + 3]};
                u32 h[4] = {high[4 * j], high[4 * j + 1], high[4 * j + 2], high[4 * j + 3]};
                multiply_eight<TILES>(sum, l, h, x, EIGHTS * strip + 8 * part + 4 * i + j);
            }
        }
    }
};

// Types with blocks of 256 are multiplied as integers, code times scale, and the block's common factors multiply the
// sums. A code in the low bits of 1024 is an f16 without a conversion. Codes times scales have at most 11 bits, so
// nothing is rounded.
template <bool FIFTH> struct KBlock {
    static const int TIMES = 2;
    struct Raw {
        uint4 head, codes[2], fifth[FIFTH ? 2 : 1];
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 strip, u32 part) {
        const uint4* block = (const uint4*)(r.codes + strip * (FIFTH ? 176 : 144));
        Raw raw;
        raw.head = block[0];
        if (FIFTH) raw.fifth[0] = block[1], raw.fifth[FIFTH] = block[2];
        raw.codes[0] = block[(FIFTH ? 3 : 1) + 2 * part];
        raw.codes[1] = block[(FIFTH ? 4 : 2) + 2 * part];
        return raw;
    }
    // For the low nibbles, and for the high ones, which are codes times 16; and the offset that removes the 1024.
    struct Scales {
        u32 low, high, low_offset, high_offset, mins;
    };
    static __device__ inline Scales scales(const uint4& head, u32 part) {
        u32 shift = 16 * (part & 1);
        u32 a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
        u32 scale = part < 2 ? a & 0x3f3f : (c & 0x0f0f) | (a >> 2 & 0x3030);
        u32 min = part < 2 ? b & 0x3f3f : (c >> 4 & 0x0f0f) | (b >> 2 & 0x3030);
        Scales s;
        s.low = add_halves(__byte_perm(scale, 0x64, 0x4040), MINUS_1024);
        s.high = fma_halves(__byte_perm(scale, 0x64, 0x4141), SIXTEENTH, MINUS_64);
        s.low_offset = multiply_halves(s.low, MINUS_1024);
        s.high_offset = multiply_halves(s.high, MINUS_1024);
        s.mins = add_halves(__byte_perm(min, 0x64, 0x4140), MINUS_1024);
        return s;
    }
    // The low nibbles of eight weights and the high ones of eight others, from two words.
    static __device__ inline void unpack(const Raw& raw, const Scales& s, int two, u32 part, u32 (&low)[4],
                                         u32 (&high)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int word = 2 * two + i;
            u32 even = word_of(raw.codes[word / 4], word % 4), odd = even >> 8;
            u32 low_even = (even & LOW_NIBBLE) | TWICE(HALF_1024), low_odd = (odd & LOW_NIBBLE) | TWICE(HALF_1024);
            u32 high_even = (even & HIGH_NIBBLE) | TWICE(HALF_1024), high_odd = (odd & HIGH_NIBBLE) | TWICE(HALF_1024);
            if (FIFTH) {
                u32 bits = word_of(raw.fifth[FIFTH ? word / 4 : 0], word % 4) >> (2 * part);
                low_even |= bits << 4 & 0x00100010, low_odd |= bits >> 4 & 0x00100010;
                high_even |= bits << 7 & 0x01000100, high_odd |= bits >> 1 & 0x01000100;
            }
            low[2 * i] = fma_halves(low_even, s.low, s.low_offset);
            low[2 * i + 1] = fma_halves(low_odd, s.low, s.low_offset);
            high[2 * i] = fma_halves(high_even, s.high, s.high_offset);
            high[2 * i + 1] = fma_halves(high_odd, s.high, s.high_offset);
        }
    }
    template <int TILES>
    static __device__ inline void multiply(const Mat& m, const Raw& lower, const Raw& upper, u32 strip, u32 part,
                                           const Activations& x, float (&sum)[TILES][4]) {
        Scales ls = scales(lower.head, part), us = scales(upper.head, part);
        float d[TILES][4] = {}, mins[TILES][4] = {};
#pragma unroll
        for (int two = 0; two < 4; two++) {
            u32 lower_low[4], lower_high[4], upper_low[4], upper_high[4];
            unpack(lower, ls, two, part, lower_low, lower_high);
            unpack(upper, us, two, part, upper_low, upper_high);
            u32 index = EIGHTS * strip + 8 * part + two;
            multiply_eight<TILES>(d, lower_low, upper_low, x, index);
            multiply_eight<TILES>(d, lower_high, upper_high, x, index + 4);
        }
        float ld = half_to_float(lower.head.x & 0xffff), lm = SUM_SCALE * half_to_float(lower.head.x >> 16);
        float ud = half_to_float(upper.head.x & 0xffff), um = SUM_SCALE * half_to_float(upper.head.x >> 16);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            uint2 sums = x.two_sums(tile, 4 * strip + part);
            u32 a[4] = {ls.mins, us.mins, ls.mins, us.mins}, b[2] = {sums.x, sums.y};
            multiply_add(mins[tile], a, b);
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[tile][i] = fmaf(i < 2 ? ld : ud, d[tile][i], fmaf(i < 2 ? -lm : -um, mins[tile][i], sum[tile][i]));
        }
    }
};
template <> struct Share<Q4_K> : KBlock<false> {};
template <> struct Share<Q5_K> : KBlock<true> {};

// The bits of one word where a mask is set, and of another elsewhere.
__device__ inline u32 select(u32 mask, u32 these, u32 those) { return (these & mask) | (those & ~mask); }

// A lane has 16 bytes of each pair of quarters of one half of a block: 16 columns of each quarter.
template <> struct Share<Q6_K> {
    static const int TIMES = 2;
    struct Raw {
        uint4 low[2], high;
        uint2 scales;
        u16 d;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 strip, u32 part) {
        const u8* low = r.codes + 128 * strip + 64 * (part / 2) + 16 * (part % 2);
        const u8* high = r.scales + 80 * strip + 32 * (part / 2) + 16 * (part % 2);
        const u8* scales = r.scales + 80 * strip + 64 + 8 * (part / 2);
        return Raw{{*(const uint4*)low, *(const uint4*)(low + 32)},
                   *(const uint4*)high,
                   *(const uint2*)scales,
                   ((const u16*)r.biases)[strip]};
    }
    // Of each quarter.
    static __device__ inline void scales(const Raw& raw, u32 part, u32 (&scale)[4]) {
        u32 a = (raw.scales.x ^ 0x80808080u) >> 8 * (part % 2), b = (raw.scales.y ^ 0x80808080u) >> 8 * (part % 2);
        scale[0] = add_halves(__byte_perm(a, 0x64, 0x4040), MINUS_1152);
        scale[1] = add_halves(__byte_perm(a, 0x64, 0x4242), MINUS_1152);
        scale[2] = add_halves(__byte_perm(b, 0x64, 0x4040), MINUS_1152);
        scale[3] = add_halves(__byte_perm(b, 0x64, 0x4242), MINUS_1152);
    }
    static __device__ inline void unpack(const Raw& raw, const u32 (&scale)[4], int two, u32 (&low)[4], u32 (&high)[4]) {
        int quarter = two / 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int word = 2 * (two % 2) + i;
            u32 even = word_of(raw.low[quarter], word), odd = even >> 8, bits = word_of(raw.high, word);
            u32 even_bits = bits << (4 - 2 * quarter), odd_bits = bits >> (4 + 2 * quarter);
            u32 low_even = (select(0x000f000f, even, even_bits) & 0x003f003f) | KEPT_1024;
            u32 low_odd = (select(0x000f000f, odd, odd_bits) & 0x003f003f) | KEPT_1024;
            u32 high_even = (select(0x00f000f0, even, even_bits) & 0x03f003f0) | KEPT_1024;
            u32 high_odd = (select(0x00f000f0, odd, odd_bits) & 0x03f003f0) | KEPT_1024;
            low[2 * i] = multiply_halves(add_halves(low_even, MINUS_1056), scale[quarter]);
            low[2 * i + 1] = multiply_halves(add_halves(low_odd, MINUS_1056), scale[quarter]);
            high[2 * i] = multiply_halves(fma_halves(high_even, SIXTEENTH, MINUS_96), scale[quarter + 2]);
            high[2 * i + 1] = multiply_halves(fma_halves(high_odd, SIXTEENTH, MINUS_96), scale[quarter + 2]);
        }
    }
    template <int TILES>
    static __device__ inline void multiply(const Mat& m, const Raw& lower, const Raw& upper, u32 strip, u32 part,
                                           const Activations& x, float (&sum)[TILES][4]) {
        u32 ls[4], us[4];
        scales(lower, part, ls);
        scales(upper, part, us);
        float d[TILES][4] = {};
#pragma unroll
        for (int two = 0; two < 4; two++) {
            u32 lower_low[4], lower_high[4], upper_low[4], upper_high[4];
            unpack(lower, ls, two, lower_low, lower_high);
            unpack(upper, us, two, upper_low, upper_high);
            u32 index = EIGHTS * strip + 16 * (part / 2) + 2 * (part % 2) + 4 * (two / 2) + two % 2;
            multiply_eight<TILES>(d, lower_low, upper_low, x, index);
            multiply_eight<TILES>(d, lower_high, upper_high, x, index + 8);
        }
        float ld = half_to_float(lower.d), ud = half_to_float(upper.d);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[tile][i] = fmaf(i < 2 ? ld : ud, d[tile][i], sum[tile][i]);
    }
};

// Like a Share, but without rounding any weight: if codes times scales have more bits than f16, scales are split.
template <u32 KIND> struct Exact : Share<KIND> {};

template <> struct Exact<Q6_K> : Share<Q6_K> {
    // The upper and the lower four bits of each quarter's scale.
    static __device__ inline void scales(const Raw& raw, u32 part, u32 (&scale)[2][4]) {
        u32 a = (raw.scales.x ^ 0x80808080u) >> 8 * (part % 2), b = (raw.scales.y ^ 0x80808080u) >> 8 * (part % 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 four = i < 2 ? a : b, which = i % 2 ? 0x4242 : 0x4040;
            scale[0][i] = add_halves(__byte_perm(four & 0xf0f0f0f0u, 0x64, which), MINUS_1152);
            scale[1][i] = add_halves(__byte_perm(four & 0x0f0f0f0fu, 0x64, which), MINUS_1024);
        }
    }
    template <int TILES>
    static __device__ inline void multiply(const Mat& m, const Raw& lower, const Raw& upper, u32 strip, u32 part,
                                           const Activations& x, float (&sum)[TILES][4]) {
        u32 ls[2][4], us[2][4];
        scales(lower, part, ls);
        scales(upper, part, us);
        // Summed separately, because each product waits for its predecessor.
        float d[2][TILES][4] = {};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 lower_low[4], lower_high[4], upper_low[4], upper_high[4];
            int two = i / 2;
            unpack(lower, ls[i % 2], two, lower_low, lower_high);
            unpack(upper, us[i % 2], two, upper_low, upper_high);
            u32 index = EIGHTS * strip + 16 * (part / 2) + 2 * (part % 2) + 4 * (two / 2) + two % 2;
            multiply_eight<TILES>(d[i % 2], lower_low, upper_low, x, index);
            multiply_eight<TILES>(d[i % 2], lower_high, upper_high, x, index + 8);
        }
        float ld = half_to_float(lower.d), ud = half_to_float(upper.d);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[tile][i] = fmaf(i < 2 ? ld : ud, d[0][tile][i] + d[1][tile][i], sum[tile][i]);
    }
};

// Larger activations are divided by a power of two, so that they fit in f16.
#define MOST_HALF 16384.0f

__device__ inline float power_for(float largest) {
    float power = 1;
    while (largest > MOST_HALF && largest < INFINITE) {
        largest *= 0.5f;
        power *= 2;
    }
    return power;
}

// Eight activations of a token: where they come from, and where they go in shared memory.
struct Eight {
    const float* x; // of the token
    u32 index;
    uint4* eights; // of the token
    u16* sums;
};

struct Loaded {
    float4 first, second;
};

// Missing columns are zero.
__device__ inline Loaded load(const Eight& eight, u32 cols) {
    Loaded loaded = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    const float4* from = (const float4*)(eight.x + 8 * eight.index);
    if (8 * eight.index < cols) loaded = Loaded{from[0], from[1]};
    return loaded;
}

// Stores eight activations in shared memory, divided by a power of two, and the sums of every 32; the lanes of a warp
// have neighbours. Returns the largest of the eight.
__device__ inline float stage(const Eight& eight, const Loaded& loaded, float power) {
    float inverse = 1 / power;
    float4 a = loaded.first, b = loaded.second;
    // In the order in which they are multiplied.
    uint4 v = {two_halves(a.x * inverse, a.z * inverse), two_halves(a.y * inverse, a.w * inverse),
               two_halves(b.x * inverse, b.z * inverse), two_halves(b.y * inverse, b.w * inverse)};
    eight.eights[place(eight.index)] = v;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 two = word_of(v, k);
        sum += half_to_float(two & 0xffff) + half_to_float(two >> 16);
    }
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    if (eight.index % 4 == 0) {
        u16* to = eight.sums + eight.index / 8 * 4 + eight.index / 4 % 2;
        sum *= 1 / SUM_SCALE;
        u16 upper = float_to_half(sum);
        to[0] = upper;
        to[2] = float_to_half(sum - half_to_float(upper));
    }
    float first = fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w)));
    float second = fmaxf(fmaxf(fabsf(b.x), fabsf(b.y)), fmaxf(fabsf(b.z), fabsf(b.w)));
    return fmaxf(first, second);
}

// Stores `count` groups of eight, whose place `at` returns, in shared memory. TOGETHER of them are in flight at a time.
// Returns the largest activation.
template <int TOGETHER, class At> __device__ inline float stage_all(u32 count, u32 cols, At at) {
    float largest = 0;
    for (u32 first = 0; first < count; first += TOGETHER) {
        Loaded loaded[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) loaded[i] = load(at(min(first + i, count - 1)), cols);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            if (first + i >= count) break;
            largest = fmaxf(largest, stage(at(first + i), loaded[i], 1));
        }
    }
    return largest;
}

// One warp stores groups [first, end) of a token whose activations may be too large for f16. Returns the power of two.
__device__ inline float stage_large(Eight token, u32 cols, u32 first, u32 end) {
    float largest = 0;
    for (u32 i = 8 * first + threadIdx.x % WARP; i < min(8 * end, cols); i += WARP)
        largest = fmaxf(largest, fabsf(token.x[i]));
    float power = power_for(warp_max(largest));
    for (token.index = first + threadIdx.x % WARP; token.index < end; token.index += WARP)
        stage(token, load(token, cols), power);
    return power;
}

// A warp's work: the rows of one lane's part, and its strips.
struct Rows {
    const Mat* lower;
    const Mat* upper;
    u64 slot;
    u32 first, step; // `step` rows further in the lower and in the upper matrix with each turn
    u32 first_strip, strips;
};

// Calls `done` with the sums of each of a warp's turns.
template <class S, int TILES, bool GATED, class Prepare, class Done>
__device__ inline void pass(const Rows& r, u32 turns, Prepare prepare, const Activations& x, Done done) {
    u32 lane = threadIdx.x % WARP, in_eight = lane / 4, part = lane % 4;
    const Mat& m = *r.lower;
    u32 next_turn = 0, next_strip = 0;
    Row low, high;
    auto find = [&]() {
        // Rows beyond the last repeat it.
        u32 row = r.first + next_turn * r.step + in_eight;
        low = row_of(m, r.slot, min(row, m.rows - 1));
        high = row_of(*r.upper, r.slot, min(GATED ? row : row + 8, m.rows - 1));
    };
    typename S::Raw lower, upper;
    auto load = [&]() {
        lower = S::load(m, low, r.first_strip + next_strip, part);
        upper = S::load(m, high, r.first_strip + next_strip, part);
        if (++next_strip == r.strips) {
            next_strip = 0;
            next_turn++;
            find();
        }
    };
    find();
    if (r.strips > 0) load();
    prepare();
    for (u32 turn = 0; turn < turns; turn++) {
        float sum[TILES][4] = {};
        // If it is short, it is unrolled twice, so that loaded registers need not be moved.
#pragma unroll(S::TIMES)
        for (u32 strip = 0; strip < r.strips; strip++) {
            typename S::Raw now_lower = lower, now_upper = upper;
            // Loads the next weights while these are multiplied.
            if (next_turn < turns) load();
            S::template multiply<TILES>(m, now_lower, now_upper, r.first_strip + strip, part, x, sum);
        }
        done(turn, sum);
    }
}

// Which of a kernel's matrices a block computes, and where that matrix's blocks start.
struct Which {
    u32 number, start;
};

__device__ inline Which which_of(const u32* blocks) {
    Which which = {0, 0};
    while (blockIdx.x >= blocks[which.number]) which.start = blocks[which.number++];
    return which;
}
