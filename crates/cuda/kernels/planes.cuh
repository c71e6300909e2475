// Types whose scales are in a separate matrix.

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

// Codes that do not end at byte boundaries: as many words as a code has bits.
template <int BITS> struct AffineWords {
    struct Raw {
        u32 words[BITS];
        float scale, bias;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        Raw raw;
#pragma unroll
        for (int i = 0; i < BITS; i++) raw.words[i] = ((const u32*)r.codes)[BITS * index + i];
        u32 at = 32 * index / m.group;
        raw.scale = float_at(m.floats, r.scales, at);
        raw.bias = float_at(m.floats, r.biases, at);
        return raw;
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int word = i * BITS / 32, shift = i * BITS % 32;
            u32 code = raw.words[word] >> shift;
            if (shift + BITS > 32) code |= raw.words[word + 1] << (32 - shift);
            g.lane[i] = (float)(code & ((1 << BITS) - 1));
        }
        g.scale[0] = g.scale[1] = raw.scale;
        g.min[0] = g.min[1] = -raw.bias;
    }
};
template <> struct Unpack<AFFINE2> : AffineWords<2> {};
template <> struct Unpack<AFFINE3> : AffineWords<3> {};
template <> struct Unpack<AFFINE5> : AffineWords<5> {};
template <> struct Unpack<AFFINE6> : AffineWords<6> {};

// Eight-bit floats, whose scales may begin and end anywhere. Lanes are the weights themselves.
template <> struct Unpack<FP8> {
    struct Raw {
        uint4 codes[2];
        const u8* scales;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        const u8* from = r.codes + 32 * index;
        u32 left = m.cols - 32 * index;
        if (m.cols % 16 == 0 && left >= 32) return Raw{{((const uint4*)from)[0], ((const uint4*)from)[1]}, r.scales};
        u32 words[8] = {};
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i < left) words[i / 4] |= (u32)from[i] << 8 * (i % 4);
        return Raw{{uint4{words[0], words[1], words[2], words[3]}, uint4{words[4], words[5], words[6], words[7]}}, r.scales};
    }
    // Four bits of exponent and three of mantissa; the largest of either sign is NaN.
    static __device__ inline float number(u32 code) {
        u32 magnitude = code & 127;
        float value = magnitude < 8 ? (float)magnitude * (1.0f / 512) : __int_as_float((magnitude << 20) + (120 << 23));
        if (magnitude == 127) value = __int_as_float(0x7fc00000);
        return __int_as_float(__float_as_int(value) | (int)((code & 128) << 24));
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
        bool together = m.group % 32 == 0;
        // Groups beyond the last use some other group's scale.
        float scale = float_at(m.floats, raw.scales, min(32 * index, m.cols - 1) / m.group);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (!together) scale = float_at(m.floats, raw.scales, min(32 * index + i, m.cols - 1) / m.group);
            g.lane[i] = __fmul_rn(number(byte_of(raw.codes[i / 16], i % 16)), scale);
        }
        g.scale[0] = g.scale[1] = 1;
        g.min[0] = g.min[1] = 0;
    }
};
