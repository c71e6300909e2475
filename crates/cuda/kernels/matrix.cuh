// Weight matrices as they lie on the device, and how each type's bytes become numbers.
//
// A row is groups of 32 weights. A type is an unpacker: it brings a group into one form, lanes with one scale for
// every sixteen of them and a minimum, `weight = lane * scale - minimum`. Everything else is written once over it.
// Codes lie apart from scales where a block's length would leave them unaligned: weights.rs says how blocks are cut.

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32
#define ALL_LANES 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)

// A kernel may be started while the one before it still runs (program.rs says when). Every kernel calls this first, or
// after no more than reading what no kernel writes: it returns when the one before has ended and all that it wrote can
// be seen. From then on the next one may start.
__device__ inline void await_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Has a line of the device's memory come to its cache, before it is read.
__device__ inline void fetch_ahead(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// The kinds that kernels are compiled for. A model has few.
#ifndef KINDS
#define KINDS 0xffffffffu
#endif

// The order is that of weights.rs.
enum Kind {
    F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, IQ4_XS, MXFP4, MXFP4_PAIRS, AFFINE4, AFFINE8, Q4_1, Q5_0, Q5_1, Q3_K,
    IQ4_NL, Q2_K, NVFP4, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S
};

struct Mat {
    const u8* plane[3]; // codes, scales, biases; of experts, how far into an expert's slot they are
    const u64* slots;   // [experts] where each expert's slot is, 0 if it has none; none for other matrices
    u32 stride[3];      // bytes of a row in each plane
    u32 rows;
    u32 cols;
    u32 kind;
    u32 group;  // weights that share a scale in an affine type
    u32 floats; // the kind of an affine type's scales
};

// Matrices that a kernel multiplies with the same rows.
#define MOST_PRODUCTS 4

// Rows of one expert that are computed together.
struct Tile {
    u32 expert, first, count;
};

// A row of a matrix.
struct Row {
    const u8* codes;
    const u8* scales;
    const u8* biases;
};

struct Group {
    float lane[32];
    float scale[2], min[2]; // each for sixteen
};

// Where an expert's slot is, 0 if it has none. Other matrices are where they are, and always there.
__device__ inline u64 slot_of(const Mat& m, u32 expert) { return m.slots ? m.slots[expert] : 0; }
__device__ inline bool absent(const Mat& m, u64 slot) { return m.slots && !slot; }

__device__ inline Row row_of(const Mat& m, u64 slot, u32 row) {
    // Added to the planes, since the compiler knows of those that they are in the device's memory.
    return Row{m.plane[0] + slot + (u64)row * m.stride[0], m.plane[1] + slot + (u64)row * m.stride[1],
               m.plane[2] + slot + (u64)row * m.stride[2]};
}

// Has memory come to the device's cache, all of it at once.
__device__ inline void fetch_ahead(const u8* from, u32 bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Whole sixteens, which begin where the memory does and end where there is still some.
    u64 start = (u64)from / 16 * 16;
    u32 size = (u32)((u64)from + bytes + 15 - start) / 16 * 16;
    if (bytes) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(start), "r"(size));
#endif
}

// The same for rows of a matrix; rows and experts that there are not do no harm. One thread's work.
__device__ inline void fetch_rows(const Mat& m, u64 slot, u32 first, u32 count) {
    if (first >= m.rows || absent(m, slot)) return;
    Row r = row_of(m, slot, first);
    count = min(count, m.rows - first);
    fetch_ahead(r.codes, count * m.stride[0]);
    fetch_ahead(r.scales, count * m.stride[1]);
    fetch_ahead(r.biases, count * m.stride[2]);
}

__device__ inline float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Two halves in a word, the first in its lower half.
__device__ inline u32 two_halves(float first, float second) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

__device__ inline float bf16_to_float(u16 bits) { return __int_as_float((u32)bits << 16); }

__device__ inline u32 byte_of(const uint4& words, u32 i) {
    u32 word = i < 4 ? words.x : i < 8 ? words.y : i < 12 ? words.z : words.w;
    return word >> (8 * (i & 3)) & 255;
}

__device__ inline u32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

#define LOW_NIBBLES 0x0f0f0f0fu

// The four bytes of a word as numbers, less an offset. A byte in the last place of 2^23 is a float without a conversion,
// which would take twice as long.
__device__ inline void four_lanes(u32 bytes, float offset, float* lane) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        lane[i] = __int_as_float(__byte_perm(bytes, 0x4b000000u, 0x7540 | i)) - (8388608.0f + offset);
}

// The doubles of the four-bit floats, as bytes of words.
__device__ inline float fp4(u32 code) {
    u32 word = code & 4 ? 0x0c080604u : 0x03020100u;
    int value = word >> (8 * (code & 3)) & 255;
    return (float)(code & 8 ? -value : value);
}

// Half of 2^(exponent - 127), since lanes are doubled.
__device__ inline float half_of_power(u32 exponent) {
    return __int_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

__device__ const i8 IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

__device__ inline float float_at(u32 kind, const u8* plane, u32 i) {
    switch (kind) {
    case F32: return ((const float*)plane)[i];
    case F16: return half_to_float(((const u16*)plane)[i]);
    default: return bf16_to_float(((const u16*)plane)[i]);
    }
}

// Sixteen bytes of nibbles: low ones first, then high ones.
template <class Value> __device__ inline void nibble_halves(const uint4& codes, Group& g, Value value) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        u32 byte = byte_of(codes, i);
        g.lane[i] = value(byte & 15);
        g.lane[i + 16] = value(byte >> 4);
    }
}

// Sixteen bytes of nibbles, two neighbours in a byte.
template <class Value> __device__ inline void nibble_pairs(const uint4& codes, Group& g, Value value) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        u32 byte = byte_of(codes, i);
        g.lane[2 * i] = value(byte & 15);
        g.lane[2 * i + 1] = value(byte >> 4);
    }
}

// The six-bit scale and minimum of part `i` of a block of Q4_K or Q5_K, from its head.
__device__ inline void scale_and_min(const uint4& head, u32 i, Group& g) {
    u32 j = 8 * (i & 3);
    u32 a = head.y >> j & 255, b = head.z >> j & 255, c = head.w >> j & 255;
    u32 scale = i < 4 ? a & 63 : (c & 15) | a >> 6 << 4;
    u32 min = i < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
    g.scale[0] = g.scale[1] = __fmul_rn(half_to_float(head.x & 0xffff), (float)scale);
    g.min[0] = g.min[1] = __fmul_rn(half_to_float(head.x >> 16), (float)min);
}

// A type's bytes of a group, and what they mean. Loading is apart from unpacking so that it can be done ahead.
template <u32 KIND> struct Unpack;

template <> struct Unpack<F32> {
    // Loaded ahead, they would take too many registers.
    struct Raw {
        const float* from;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{(const float*)r.codes + 32 * index};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        u32 left = m.cols - 32 * index;
        if (m.cols % 4 == 0 && left >= 32) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float4 four = ((const float4*)raw.from)[i];
                g.lane[4 * i] = four.x, g.lane[4 * i + 1] = four.y;
                g.lane[4 * i + 2] = four.z, g.lane[4 * i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 32; i++) g.lane[i] = 32 * index < m.cols && i < left ? raw.from[i] : 0;
        }
        g.scale[0] = g.scale[1] = 1;
        g.min[0] = g.min[1] = 0;
    }
};

template <bool BRAIN> struct Halves {
    struct Raw {
        u32 two[16];
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        const u16* from = (const u16*)r.codes + 32 * index;
        u32 left = m.cols - 32 * index;
        Raw raw;
        if (m.cols % 8 == 0 && left >= 32) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint4 eight = ((const uint4*)from)[i];
                raw.two[4 * i] = eight.x, raw.two[4 * i + 1] = eight.y;
                raw.two[4 * i + 2] = eight.z, raw.two[4 * i + 3] = eight.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                u32 low = 2 * i < left ? from[2 * i] : 0, high = 2 * i + 1 < left ? from[2 * i + 1] : 0;
                raw.two[i] = low | high << 16;
            }
        }
        return raw;
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            u16 low = raw.two[i] & 0xffff, high = raw.two[i] >> 16;
            g.lane[2 * i] = BRAIN ? bf16_to_float(low) : half_to_float(low);
            g.lane[2 * i + 1] = BRAIN ? bf16_to_float(high) : half_to_float(high);
        }
        g.scale[0] = g.scale[1] = 1;
        g.min[0] = g.min[1] = 0;
    }
};
template <> struct Unpack<F16> : Halves<false> {};
template <> struct Unpack<BF16> : Halves<true> {};

template <> struct Unpack<Q8_0> {
    struct Raw {
        uint4 codes[2];
        u16 d;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        const uint4* from = (const uint4*)(r.codes + 32 * index);
        return Raw{{from[0], from[1]}, ((const u16*)r.scales)[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            four_lanes(word_of(raw.codes[i / 4], i % 4) ^ 0x80808080u, 128, g.lane + 4 * i);
        g.scale[0] = g.scale[1] = half_to_float(raw.d);
        g.min[0] = g.min[1] = 0;
    }
};

// Sixteen bytes of nibbles, less an offset: low ones first.
__device__ inline void nibble_lanes(const uint4& codes, float offset, Group& g) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = word_of(codes, i);
        four_lanes(word & LOW_NIBBLES, offset, g.lane + 4 * i);
        four_lanes(word >> 4 & LOW_NIBBLES, offset, g.lane + 16 + 4 * i);
    }
}

// Four bits, the lowest first, as the fifth bits of four bytes.
__device__ inline u32 fifth_bits(u32 bits) {
    bits &= 15;
    return ((bits | bits << 7 | bits << 14 | bits << 21) & 0x01010101u) << 4;
}

// The same with a word of fifth bits.
__device__ inline void five_bit_lanes(const uint4& codes, u32 fifth, float offset, Group& g) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = word_of(codes, i);
        four_lanes((word & LOW_NIBBLES) | fifth_bits(fifth >> 4 * i), offset, g.lane + 4 * i);
        four_lanes((word >> 4 & LOW_NIBBLES) | fifth_bits(fifth >> (16 + 4 * i)), offset, g.lane + 16 + 4 * i);
    }
}

template <> struct Unpack<Q4_0> {
    struct Raw {
        uint4 codes;
        u16 d;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint4*)r.codes)[index], ((const u16*)r.scales)[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        nibble_lanes(raw.codes, 8, g);
        g.scale[0] = g.scale[1] = half_to_float(raw.d);
        g.min[0] = g.min[1] = 0;
    }
};

template <> struct Unpack<Q4_1> {
    struct Raw {
        uint4 codes;
        u32 head; // scale and what is added
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint4*)r.codes)[index], ((const u32*)r.scales)[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        nibble_lanes(raw.codes, 0, g);
        g.scale[0] = g.scale[1] = half_to_float(raw.head & 0xffff);
        g.min[0] = g.min[1] = -half_to_float(raw.head >> 16);
    }
};

template <> struct Unpack<Q5_0> {
    struct Raw {
        uint4 codes;
        u32 fifth;
        u16 d;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint4*)r.codes)[index], ((const u32*)r.scales)[index], ((const u16*)r.biases)[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        five_bit_lanes(raw.codes, raw.fifth, 16, g);
        g.scale[0] = g.scale[1] = half_to_float(raw.d);
        g.min[0] = g.min[1] = 0;
    }
};

template <> struct Unpack<Q5_1> {
    struct Raw {
        uint4 codes;
        uint2 head; // scale and what is added, then the fifth bits
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint4*)r.codes)[index], ((const uint2*)r.scales)[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        five_bit_lanes(raw.codes, raw.head.y, 0, g);
        g.scale[0] = g.scale[1] = half_to_float(raw.head.x & 0xffff);
        g.min[0] = g.min[1] = -half_to_float(raw.head.x >> 16);
    }
};

template <> struct Unpack<Q2_K> {
    struct Raw {
        uint4 codes[2];
        u32 head;   // what scales and minima are multiplied by
        u16 scales; // two nibbles each: a scale and a minimum
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        const uint4* from = (const uint4*)(r.codes + 32 * (index / 4));
        return Raw{{from[0], from[1]}, ((const u32*)r.biases)[index / 8], ((const u16*)r.scales)[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        u32 shift = 2 * (index % 4);
#pragma unroll
        for (int i = 0; i < 8; i++)
            four_lanes(word_of(raw.codes[i / 4], i % 4) >> shift & 0x03030303u, 0, g.lane + 4 * i);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 both = raw.scales >> (8 * i);
            g.scale[i] = __fmul_rn(half_to_float(raw.head & 0xffff), (float)(both & 15));
            g.min[i] = __fmul_rn(half_to_float(raw.head >> 16), (float)(both >> 4 & 15));
        }
    }
};

template <> struct Unpack<Q3_K> {
    struct Raw {
        uint4 third[2], codes[2];
        u32 scales[3];
        u16 d;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        u32 block = index / 8, half = index % 8 / 4;
        const uint4* from = (const uint4*)(r.codes + 96 * block);
        const u32* scales = (const u32*)(r.scales + 12 * block);
        return Raw{{from[0], from[1]},
                   {from[2 + 2 * half], from[3 + 2 * half]},
                   {scales[0], scales[1], scales[2]},
                   ((const u16*)r.biases)[block]};
    }
    // The six-bit scale `i` of a block's sixteen: four bits of it among the first two words, two in the last.
    static __device__ inline float scale(const Raw& raw, u32 i) {
        u32 word = i & 4 ? raw.scales[1] : raw.scales[0];
        u32 low = word >> (8 * (i & 3) + (i < 8 ? 0 : 4)) & 15;
        u32 high = raw.scales[2] >> (8 * (i & 3) + 2 * (i / 4)) & 3;
        return __fmul_rn(half_to_float(raw.d), (float)((int)(low | high << 4) - 32));
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        u32 part = index % 8, shift = 2 * (part % 4);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 low = word_of(raw.codes[i / 4], i % 4) >> shift & 0x03030303u;
            u32 third = word_of(raw.third[i / 4], i % 4) >> part & 0x01010101u;
            four_lanes(low | third << 2, 4, g.lane + 4 * i);
        }
        g.scale[0] = scale(raw, 2 * part);
        g.scale[1] = scale(raw, 2 * part + 1);
        g.min[0] = g.min[1] = 0;
    }
};

template <> struct Unpack<Q4_K> {
    struct Raw {
        uint4 head, codes[2];
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        const uint4* block = (const uint4*)(r.codes + index / 8 * 144);
        u32 pair = index % 8 / 2;
        return Raw{block[0], {block[1 + 2 * pair], block[2 + 2 * pair]}};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        scale_and_min(raw.head, index % 8, g);
        u32 shift = 4 * (index & 1);
#pragma unroll
        for (int i = 0; i < 8; i++)
            four_lanes(word_of(raw.codes[i / 4], i % 4) >> shift & LOW_NIBBLES, 0, g.lane + 4 * i);
    }
};

template <> struct Unpack<Q5_K> {
    struct Raw {
        uint4 head, fifth[2], codes[2];
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        const uint4* block = (const uint4*)(r.codes + index / 8 * 176);
        u32 pair = index % 8 / 2;
        return Raw{block[0], {block[1], block[2]}, {block[3 + 2 * pair], block[4 + 2 * pair]}};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        u32 part = index % 8, shift = 4 * (part & 1);
        scale_and_min(raw.head, part, g);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 bits = word_of(raw.fifth[i / 4], i % 4) >> part & 0x01010101u;
            four_lanes((word_of(raw.codes[i / 4], i % 4) >> shift & LOW_NIBBLES) | bits << 4, 0, g.lane + 4 * i);
        }
    }
};

template <> struct Unpack<Q6_K> {
    struct Raw {
        uint4 low[2], high[2];
        u16 d, scales;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        u32 block = index / 8, part = index % 8;
        u32 half = part / 4, quarter = part % 4;
        const uint4* low = (const uint4*)(r.codes + 128 * block + 64 * half + 32 * (quarter & 1));
        const uint4* high = (const uint4*)(r.scales + 80 * block + 32 * half);
        const u16* scales = (const u16*)(r.scales + 80 * block + 64);
        return Raw{{low[0], low[1]}, {high[0], high[1]}, ((const u16*)r.biases)[block], scales[part]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        u32 quarter = index % 4;
        u32 shift = 4 * (quarter >> 1), pair = 2 * quarter;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 low = word_of(raw.low[i / 4], i % 4) >> shift & LOW_NIBBLES;
            u32 high = word_of(raw.high[i / 4], i % 4) >> pair & 0x03030303u;
            four_lanes(low | high << 4, 32, g.lane + 4 * i);
        }
        float d = half_to_float(raw.d);
        g.scale[0] = __fmul_rn(d, (float)(i8)(raw.scales & 255));
        g.scale[1] = __fmul_rn(d, (float)(i8)(raw.scales >> 8));
        g.min[0] = g.min[1] = 0;
    }
};

template <> struct Unpack<IQ4_XS> {
    struct Raw {
        uint2 head;
        uint4 codes;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint2*)r.scales)[index / 8], ((const uint4*)r.codes)[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        u32 part = index % 8;
        u32 low = raw.head.y >> (4 * part) & 15, high = raw.head.x >> (16 + 2 * part) & 3;
        float scale = (float)((int)(low | high << 4) - 32);
        g.scale[0] = g.scale[1] = __fmul_rn(half_to_float(raw.head.x & 0xffff), scale);
        g.min[0] = g.min[1] = 0;
        nibble_halves(raw.codes, g, [](u32 nibble) { return (float)IQ4_VALUES[nibble]; });
    }
};

template <> struct Unpack<IQ4_NL> {
    struct Raw {
        uint4 codes;
        u16 d;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint4*)r.codes)[index], ((const u16*)r.scales)[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        nibble_halves(raw.codes, g, [](u32 nibble) { return (float)IQ4_VALUES[nibble]; });
        g.scale[0] = g.scale[1] = half_to_float(raw.d);
        g.min[0] = g.min[1] = 0;
    }
};

template <bool PAIRS> struct Fp4 {
    struct Raw {
        uint4 codes;
        u8 exponent;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint4*)r.codes)[index], r.scales[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        if (PAIRS) nibble_pairs(raw.codes, g, fp4);
        else nibble_halves(raw.codes, g, fp4);
        g.scale[0] = g.scale[1] = half_of_power(raw.exponent);
        g.min[0] = g.min[1] = 0;
    }
};
template <> struct Unpack<MXFP4> : Fp4<false> {};
template <> struct Unpack<MXFP4_PAIRS> : Fp4<true> {};

template <> struct Unpack<NVFP4> {
    struct Raw {
        uint4 codes;
        u16 scales;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint4*)r.codes)[index], ((const u16*)r.scales)[index]};
    }
    // Half of a float of four bits of exponent and three of mantissa, since lanes are doubled. The sign is ignored.
    static __device__ inline float scale(u32 byte) {
        u32 exponent = byte >> 3 & 15, mantissa = byte & 7;
        u32 steps = byte == 0x7f ? 0 : exponent ? 8 + mantissa : mantissa;
        return (float)steps * __int_as_float((117 + (exponent ? exponent - 1 : 0)) << 23);
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            u32 byte = byte_of(raw.codes, i);
            g.lane[i + i / 8 * 8] = fp4(byte & 15);
            g.lane[i + i / 8 * 8 + 8] = fp4(byte >> 4);
        }
        g.scale[0] = scale(raw.scales & 255);
        g.scale[1] = scale(raw.scales >> 8);
        g.min[0] = g.min[1] = 0;
    }
};

template <bool BYTES> struct Affine {
    struct Raw {
        uint4 codes[2];
        float scale, bias;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        const uint4* from = (const uint4*)(r.codes + (BYTES ? 32 : 16) * index);
        u32 at = 32 * index / m.group;
        return Raw{{from[0], from[BYTES]}, float_at(m.floats, r.scales, at), float_at(m.floats, r.biases, at)};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        if (BYTES) {
#pragma unroll
            for (int i = 0; i < 8; i++) four_lanes(word_of(raw.codes[i / 4], i % 4), 0, g.lane + 4 * i);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 word = word_of(raw.codes[0], i);
                float even[4], odd[4];
                four_lanes(word & LOW_NIBBLES, 0, even);
                four_lanes(word >> 4 & LOW_NIBBLES, 0, odd);
#pragma unroll
                for (int j = 0; j < 4; j++) g.lane[8 * i + 2 * j] = even[j], g.lane[8 * i + 2 * j + 1] = odd[j];
            }
        }
        g.scale[0] = g.scale[1] = raw.scale;
        g.min[0] = g.min[1] = -raw.bias;
    }
};
template <> struct Unpack<AFFINE4> : Affine<false> {};
template <> struct Unpack<AFFINE8> : Affine<true> {};

#if KINDS
#include "grids.cuh"
#endif

template <u32 KIND> __device__ inline void unpack_group(const Mat& m, const Row& r, u32 index, Group& g) {
    Unpack<KIND>::unpack(m, Unpack<KIND>::load(m, r, index), index, g);
}

// The weights themselves, with the roundings that the processor's kernels have.
__device__ inline float weight(const Group& g, int i) {
    return __fsub_rn(__fmul_rn(g.scale[i / 16], g.lane[i]), g.min[i / 16]);
}

// Calls `body` with the kind of a matrix as a constant. Only the kinds in KINDS, a bit for each, are compiled.
#define WITH_KIND(kind, body)                                                                                          \
    switch (kind) {                                                                                                    \
        KIND_CASE(F32, body)                                                                                           \
        KIND_CASE(F16, body)                                                                                           \
        KIND_CASE(BF16, body)                                                                                          \
        KIND_CASE(Q8_0, body)                                                                                          \
        KIND_CASE(Q4_0, body)                                                                                          \
        KIND_CASE(Q4_K, body)                                                                                          \
        KIND_CASE(Q5_K, body)                                                                                          \
        KIND_CASE(Q6_K, body)                                                                                          \
        KIND_CASE(IQ4_XS, body)                                                                                        \
        KIND_CASE(MXFP4, body)                                                                                         \
        KIND_CASE(MXFP4_PAIRS, body)                                                                                   \
        KIND_CASE(AFFINE4, body)                                                                                       \
        KIND_CASE(AFFINE8, body)                                                                                       \
        KIND_CASE(Q4_1, body)                                                                                          \
        KIND_CASE(Q5_0, body)                                                                                          \
        KIND_CASE(Q5_1, body)                                                                                          \
        KIND_CASE(Q3_K, body)                                                                                          \
        KIND_CASE(IQ4_NL, body)                                                                                        \
        KIND_CASE(Q2_K, body)                                                                                          \
        KIND_CASE(NVFP4, body)                                                                                         \
        KIND_CASE(IQ1_S, body)                                                                                         \
        KIND_CASE(IQ1_M, body)                                                                                         \
        KIND_CASE(IQ2_XXS, body)                                                                                       \
        KIND_CASE(IQ2_XS, body)                                                                                        \
        KIND_CASE(IQ2_S, body)                                                                                         \
        KIND_CASE(IQ3_XXS, body)                                                                                       \
        KIND_CASE(IQ3_S, body)                                                                                         \
    }
#define KIND_CASE(KIND, body)                                                                                          \
    case KIND:                                                                                                         \
        if constexpr (KINDS >> KIND & 1) { body(KIND); }                                                               \
        break;

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// The sum over a block; every thread gets it. At most 32 warps.
__device__ inline float block_sum(float x) {
    __shared__ float sums[WARP];
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    u32 warps = blockDim.x / WARP;
    x = warp_sum(threadIdx.x % WARP < warps ? sums[threadIdx.x % WARP] : 0);
    __syncthreads();
    return x;
}

__device__ inline float block_max(float x) {
    __shared__ float largest[WARP];
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) largest[threadIdx.x / WARP] = x;
    __syncthreads();
    u32 warps = blockDim.x / WARP;
    x = warp_max(threadIdx.x % WARP < warps ? largest[threadIdx.x % WARP] : -INFINITE);
    __syncthreads();
    return x;
}

__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ inline float silu(float x) { return x * sigmoid(x); }

// How an expert joins its gate and its up; a limit of 0 is none.
__device__ inline float activate(float gate, float up, float alpha, float limit) {
    if (limit == 0) return silu(gate) * up;
    gate = gate > limit ? limit : gate;
    return (fminf(fmaxf(up, -limit), limit) + 1) * (gate * sigmoid(alpha * gate));
}

// A norm of activations before they are multiplied, and what is added to them before that.
struct PriorNorm {
    const float* w;     // or none: then there is no norm
    const float* added; // or none
    float* sum;         // where the sum goes, if something is added
    float* normed;      // where the normed activations go
    float eps;
};

// Counts up, and tells what the counter was. Whoever counts later sees what was written before.
__device__ inline u32 count_up(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(1u) : "memory");
    return before;
}

// Whether this is the last of `count` blocks that call it with the same counter: that one sees what all of them wrote
// before. The counter is zero before and after.
__device__ inline bool last_of(u32* counter, u32 count) {
    __shared__ u32 number;
    // The others' writes come before the barrier, and so before the first thread's count.
    __syncthreads();
    if (threadIdx.x == 0) {
        number = count_up(counter);
        if (number == count - 1) *counter = 0;
    }
    __syncthreads();
    return number == count - 1;
}
