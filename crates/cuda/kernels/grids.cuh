// Types whose lanes are points of a grid, chosen by index. The grids themselves are inserted before this text.

// The lanes of four bytes, negative where a bit is set.
__device__ inline void signed_lanes(u32 bytes, u32 signs, float* lane) {
    four_lanes(bytes, 0, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) lane[i] = __int_as_float(__float_as_int(lane[i]) ^ (int)(signs >> i << 31));
}

__device__ inline void signed_lanes(u64 bytes, u32 signs, float* lane) {
    signed_lanes((u32)bytes, signs, lane);
    signed_lanes((u32)(bytes >> 32), signs >> 4, lane + 4);
}

// Seven signs, and an eighth that makes the number of minus signs even.
__device__ inline u32 even_signs(u32 bits) {
    u32 seven = bits & 127;
    return seven | (__popc(seven) & 1) << 7;
}

// A scale of `n` and a half units, where `d` is the scale of two units.
__device__ inline float odd_scale(u16 d, float unit, u32 n) {
    return __fmul_rn(__fmul_rn(half_to_float(d), unit), (float)(2 * n + 1));
}

__device__ inline void set_scales(float first, float second, Group& g) {
    g.scale[0] = first;
    g.scale[1] = second;
    g.min[0] = g.min[1] = 0;
}

template <> struct Unpack<IQ2_XXS> {
    struct Raw {
        uint2 codes; // points, then signs and a scale
        u16 d;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint2*)r.codes)[index], ((const u16*)r.scales)[index / 8]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            signed_lanes(GRID_IQ2_XXS[raw.codes.x >> 8 * i & 255], even_signs(raw.codes.y >> 7 * i), g.lane + 8 * i);
        float scale = odd_scale(raw.d, 0.125f, raw.codes.y >> 28);
        set_scales(scale, scale, g);
    }
};

template <> struct Unpack<IQ2_XS> {
    struct Raw {
        uint2 codes; // nine bits of a point and seven signs, four times
        u16 d;
        u8 scales;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint2*)r.codes)[index], ((const u16*)r.biases)[index / 8], r.scales[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 code = (i < 2 ? raw.codes.x : raw.codes.y) >> (16 * (i & 1)) & 0xffff;
            signed_lanes(GRID_IQ2_XS[code & 511], even_signs(code >> 9), g.lane + 8 * i);
        }
        set_scales(odd_scale(raw.d, 0.125f, raw.scales & 15), odd_scale(raw.d, 0.125f, raw.scales >> 4), g);
    }
};

template <> struct Unpack<IQ2_S> {
    struct Raw {
        u32 points, signs;
        u16 d;
        u8 top, scales;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        u32 block = index / 8, part = index % 8;
        const u32* codes = (const u32*)(r.codes + 64 * block);
        const u8* rest = r.scales + 16 * block;
        return Raw{codes[part], codes[8 + part], ((const u16*)r.biases)[block], rest[part], rest[8 + part]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 point = (raw.points >> 8 * i & 255) | (raw.top >> 2 * i & 3) << 8;
            signed_lanes(GRID_IQ2_S[point], raw.signs >> 8 * i, g.lane + 8 * i);
        }
        set_scales(odd_scale(raw.d, 0.125f, raw.scales & 15), odd_scale(raw.d, 0.125f, raw.scales >> 4), g);
    }
};

template <> struct Unpack<IQ3_XXS> {
    struct Raw {
        uint2 points;
        u32 signs; // and a scale
        u16 d;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        u32 block = index / 8, part = index % 8;
        const u8* codes = r.codes + 96 * block;
        return Raw{((const uint2*)codes)[part], ((const u32*)codes)[16 + part], ((const u16*)r.scales)[block]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 point = (i < 4 ? raw.points.x : raw.points.y) >> (8 * (i & 3)) & 255;
            signed_lanes(GRID_IQ3_XXS[point], even_signs(raw.signs >> 7 * (i / 2)) >> 4 * (i & 1), g.lane + 4 * i);
        }
        float scale = odd_scale(raw.d, 0.25f, raw.signs >> 28);
        set_scales(scale, scale, g);
    }
};

template <> struct Unpack<IQ3_S> {
    struct Raw {
        uint2 points;
        u32 signs;
        u16 d;
        u8 top, scales;
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        u32 block = index / 8, part = index % 8;
        const u8* rest = r.scales + 44 * block;
        return Raw{((const uint2*)r.codes)[index], ((const u32*)rest)[2 + part], ((const u16*)r.biases)[block], rest[part],
                   rest[40 + part / 2]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 point = (i < 4 ? raw.points.x : raw.points.y) >> (8 * (i & 3)) & 255;
            signed_lanes(GRID_IQ3_S[point | (raw.top >> i & 1) << 8], raw.signs >> 4 * i, g.lane + 4 * i);
        }
        float scale = odd_scale(raw.d, 1, raw.scales >> 4 * (index & 1) & 15);
        set_scales(scale, scale, g);
    }
};

// The lanes of a point of the one-bit grid, in eighths and shifted by one. The grid's bytes are larger by eight.
__device__ inline void shifted_lanes(u32 point, bool down, float* lane) {
    u64 bytes = GRID_IQ1[point];
    float offset = down ? 9 : 7;
    four_lanes((u32)bytes, offset, lane);
    four_lanes((u32)(bytes >> 32), offset, lane + 4);
}

template <> struct Unpack<IQ1_S> {
    struct Raw {
        u32 points;
        u16 top, d; // three bits of each point, a scale and the shift
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const u32*)r.codes)[index], ((const u16*)r.scales)[index], ((const u16*)r.biases)[index / 8]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            shifted_lanes((raw.points >> 8 * i & 255) | (raw.top >> 3 * i & 7) << 8, raw.top >> 15, g.lane + 8 * i);
        float scale = odd_scale(raw.d, 0.125f, raw.top >> 12 & 7);
        set_scales(scale, scale, g);
    }
};

template <> struct Unpack<IQ1_M> {
    struct Raw {
        uint2 scales; // of the block: twelve bits of scales and four of `d`, four times
        u32 points;
        u16 top; // three bits and the shift of each point
    };
    static __device__ inline Raw load(const Mat& m, const Row& r, u32 index) {
        return Raw{((const uint2*)r.biases)[index / 8], ((const u32*)r.codes)[index], ((const u16*)r.scales)[index]};
    }
    static __device__ inline void unpack(const Mat& m, const Raw& raw, u32 index, Group& g) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 top = raw.top >> 4 * i;
            shifted_lanes((raw.points >> 8 * i & 255) | (top & 7) << 8, top & 8, g.lane + 8 * i);
        }
        u32 part = index % 8, x = raw.scales.x, y = raw.scales.y;
        u16 d = (x >> 12 & 15) | (x >> 28) << 4 | (y >> 12 & 15) << 8 | (y >> 28) << 12;
        u32 scales = (part < 4 ? x : y) >> (16 * (part / 2 & 1) + 6 * (part & 1));
        set_scales(odd_scale(d, 0.125f, scales & 7), odd_scale(d, 0.125f, scales >> 3 & 7), g);
    }
};
