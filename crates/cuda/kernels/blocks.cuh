// Types whose weights are in blocks, with each block's scales inside it or split from it; and floats.

// The doubles of four-bit floats, as bytes of words.
__device__ inline float fp4(u32 code) {
    u32 word = code & 4 ? 0x0c080604u : 0x03020100u;
    int value = word >> (8 * (code & 3)) & 255;
    return (float)(code & 8 ? -value : value);
}

// Half of 2^(exponent - 127), because lanes are doubled.
__device__ inline float half_of_power(u32 exponent) {
    return __int_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

__device__ const i8 IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// 16 bytes of nibbles: all low ones first, then all high ones.
template <class Value> __device__ inline void nibble_halves(const uint4& codes, Group& g, Value value) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        u32 byte = byte_of(codes, i);
        g.lane[i] = value(byte & 15);
        g.lane[i + 16] = value(byte >> 4);
    }
}

// 16 bytes of nibbles, two neighbours per byte.
template <class Value> __device__ inline void nibble_pairs(const uint4& codes, Group& g, Value value) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        u32 byte = byte_of(codes, i);
        g.lane[2 * i] = value(byte & 15);
        g.lane[2 * i + 1] = value(byte >> 4);
    }
}

// The six-bit scale and minimum of part `i` of a block of Q4_K or Q5_K, from the block's head.
__device__ inline void scale_and_min(const uint4& head, u32 i, Group& g) {
    u32 j = 8 * (i & 3);
    u32 a = head.y >> j & 255, b = head.z >> j & 255, c = head.w >> j & 255;
    u32 scale = i < 4 ? a & 63 : (c & 15) | a >> 6 << 4;
    u32 min = i < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
    g.scale[0] = g.scale[1] = __fmul_rn(half_to_float(head.x & 0xffff), (float)scale);
    g.min[0] = g.min[1] = __fmul_rn(half_to_float(head.x >> 16), (float)min);
}

template <> struct Unpack<F32> {
    // Loading floats ahead would take too many registers.
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

// 16 bytes of nibbles less an offset: all low ones first.
__device__ inline void nibble_lanes(const uint4& codes, float offset, Group& g) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = word_of(codes, i);
        four_lanes(word & LOW_NIBBLES, offset, g.lane + 4 * i);
        four_lanes(word >> 4 & LOW_NIBBLES, offset, g.lane + 16 + 4 * i);
    }
}

// Four bits, lowest first, as the fifth bits of four bytes.
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
        u32 head; // scale and minimum
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
        uint2 head; // scale and minimum, then the fifth bits
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
        u32 head;   // factors of scales and minima
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
    // The six-bit scale `i` of a block's 16: four of its bits are in the first two words, two in the last.
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
    // Half of a float with four bits of exponent and three of mantissa, because lanes are doubled. The sign is ignored.
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
