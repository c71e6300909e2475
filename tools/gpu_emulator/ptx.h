// The machine instructions that kernels use in `asm`. The emulator's compiler translates `asm("a.b.c %0, %1;" …)` to a
// call of `ptx_a_b_c` with the operands in the order of the text. An instruction that is missing here is an error with
// its name.
#pragma once

// f16.

static inline float emulator_half(uint16_t bits) { return (float)emulator_bits<EmulatorHalf>(bits); }
static inline uint16_t emulator_to_half(float x) { return emulator_bits<uint16_t>((EmulatorHalf)x); }
static inline float emulator_bf16(uint16_t bits) { return __uint_as_float((unsigned)bits << 16); }

static inline void ptx_cvt_f32_f16(float& to, uint16_t bits) { to = emulator_half(bits); }
static inline void ptx_cvt_rn_f16_f32(uint16_t& to, float x) { to = emulator_to_half(x); }
static inline void ptx_cvt_rn_f16x2_f32(unsigned& to, float high, float low) {
    to = (unsigned)emulator_to_half(high) << 16 | emulator_to_half(low);
}

// Two f16 in a word. Intermediate results are precise enough for a single rounding.

template <class Operation> static inline unsigned emulator_by_halves(Operation operation) {
    return (unsigned)emulator_bits<uint16_t>((EmulatorHalf)operation(16)) << 16 |
           emulator_bits<uint16_t>((EmulatorHalf)operation(0));
}
static inline double emulator_half_at(unsigned word, int shift) { return emulator_half(word >> shift & 0xffff); }
static inline void ptx_add_rn_f16x2(unsigned& to, unsigned a, unsigned b) {
    to = emulator_by_halves([=](int at) { return emulator_half_at(a, at) + emulator_half_at(b, at); });
}
static inline void ptx_mul_rn_f16x2(unsigned& to, unsigned a, unsigned b) {
    to = emulator_by_halves([=](int at) { return emulator_half_at(a, at) * emulator_half_at(b, at); });
}
static inline void ptx_fma_rn_f16x2(unsigned& to, unsigned a, unsigned b, unsigned c) {
    to = emulator_by_halves(
        [=](int at) { return emulator_half_at(a, at) * emulator_half_at(b, at) + emulator_half_at(c, at); });
}

#pragma GCC push_options
#pragma GCC optimize("O3")

// Matrices of 8 by 8 f16 from shared memory. Lanes 8 i to 8 i + 7 pass the addresses of matrix i's rows.

template <int COUNT, bool TRANSPOSED> static inline void emulator_load_matrices(unsigned address, unsigned* to) {
    struct Mine {
        const uint16_t* row;
        unsigned* to;
    } mine = {(const uint16_t*)emulator_shared_place(address), to};
    if (emulator_lane() < 8 * COUNT && address % 16) emulator_fail("ldmatrix of an address that is no multiple of 16");
    emulator_meet(0xffffffffu, [](void* const* lanes, unsigned) {
        for (unsigned lane = 0; lane < 32; lane++)
            for (int i = 0; i < COUNT; i++) {
                unsigned row = lane / 4, col = lane % 4 * 2;
                auto at = [&](unsigned r, unsigned c) { return (unsigned)((Mine*)lanes[8 * i + r])->row[c]; };
                unsigned low = TRANSPOSED ? at(col, row) : at(row, col);
                unsigned high = TRANSPOSED ? at(col + 1, row) : at(row, col + 1);
                ((Mine*)lanes[lane])->to[i] = low | high << 16;
            }
    }, &mine);
}
#define EMULATOR_LDMATRIX(suffix, transposed)                                                                          \
    static inline void ptx_ldmatrix_sync_aligned_m8n8_x1_##suffix(unsigned& a, unsigned address) {                     \
        emulator_load_matrices<1, transposed>(address, &a);                                                            \
    }                                                                                                                  \
    static inline void ptx_ldmatrix_sync_aligned_m8n8_x2_##suffix(unsigned& a, unsigned& b, unsigned address) {        \
        unsigned to[2];                                                                                                \
        emulator_load_matrices<2, transposed>(address, to);                                                            \
        a = to[0], b = to[1];                                                                                          \
    }                                                                                                                  \
    static inline void ptx_ldmatrix_sync_aligned_m8n8_x4_##suffix(unsigned& a, unsigned& b, unsigned& c, unsigned& d,  \
                                                                  unsigned address) {                                  \
        unsigned to[4];                                                                                                \
        emulator_load_matrices<4, transposed>(address, to);                                                            \
        a = to[0], b = to[1], c = to[2], d = to[3];                                                                    \
    }
EMULATOR_LDMATRIX(shared_b16, false)
EMULATOR_LDMATRIX(trans_shared_b16, true)
#undef EMULATOR_LDMATRIX

// Products of 16 by 16 with 16 by 8 matrices, whose numbers are distributed over the lanes.

template <float (*NUMBER)(uint16_t)>
static inline void emulator_multiply(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2,
                                     unsigned a3, unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
    struct Mine {
        unsigned a[4], b[2];
        float c[4];
    } mine = {{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};
    emulator_meet(0xffffffffu, [](void* const* lanes, unsigned) {
        float a[16][16], b[16][8], c[16][8];
        for (unsigned lane = 0; lane < 32; lane++) {
            const Mine* mine = (Mine*)lanes[lane];
            unsigned group = lane / 4, pair = lane % 4 * 2;
            for (int half = 0; half < 2; half++) {
                for (int i = 0; i < 4; i++)
                    a[group + i % 2 * 8][pair + i / 2 * 8 + half] = NUMBER(mine->a[i] >> (16 * half));
                for (int i = 0; i < 2; i++) b[pair + 8 * i + half][group] = NUMBER(mine->b[i] >> (16 * half));
            }
            for (int i = 0; i < 4; i++) c[group + i / 2 * 8][pair + i % 2] = mine->c[i];
        }
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++)
                for (int col = 0; col < 8; col++) c[row][col] += a[row][k] * b[k][col];
        for (unsigned lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) ((Mine*)lanes[lane])->c[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }, &mine);
    d0 = mine.c[0], d1 = mine.c[1], d2 = mine.c[2], d3 = mine.c[3];
}
#define ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32 emulator_multiply<emulator_half>
#define ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32 emulator_multiply<emulator_bf16>

#pragma GCC pop_options

// Asynchronous copies to shared memory.

#define EMULATOR_CP_ASYNC(name)                                                                                        \
    static inline void name(unsigned to, const void* from, unsigned bytes, unsigned given) {                           \
        emulator_copy_later(emulator_shared_place(to), from, bytes, given);                                            \
    }                                                                                                                  \
    static inline void name(unsigned to, const void* from, unsigned bytes) { name(to, from, bytes, bytes); }           \
    static inline void name(unsigned to, size_t from, unsigned bytes) { name(to, (const void*)from, bytes, bytes); }   \
    static inline void name(unsigned to, size_t from, unsigned bytes, unsigned given) {                                \
        name(to, (const void*)from, bytes, given);                                                                     \
    }
EMULATOR_CP_ASYNC(ptx_cp_async_cg_shared_global)
EMULATOR_CP_ASYNC(ptx_cp_async_ca_shared_global)
EMULATOR_CP_ASYNC(ptx_cp_async_cg_shared_global_L2__128B)
EMULATOR_CP_ASYNC(ptx_cp_async_ca_shared_global_L2__128B)
EMULATOR_CP_ASYNC(ptx_cp_async_cg_shared_global_L2__256B)
#undef EMULATOR_CP_ASYNC
static inline void ptx_cp_async_commit_group() { emulator_commit_copies(); }
static inline void ptx_cp_async_wait_group(unsigned left) { emulator_wait_copies(left); }
static inline void ptx_cp_async_wait_all() {
    emulator_commit_copies();
    emulator_wait_copies(0);
}

// Barriers of some of a block's warps.

static inline void ptx_bar_sync(unsigned number, unsigned count = 0) { emulator_barrier(number, count, false); }
static inline void ptx_bar_arrive(unsigned number, unsigned count) { emulator_arrive(number, count); }
static inline void ptx_barrier_sync(unsigned number, unsigned count = 0) { emulator_barrier(number, count, false); }

// Hints, which change only time. A kernel starts after its predecessors have ended, so there is nothing to wait for.

template <class T> static inline void ptx_prefetch_global_L2(T) {}
template <class T> static inline void ptx_prefetch_global_L1(T) {}
template <class T> static inline void ptx_prefetch_global_L2__evict_last(T) {}
template <class T> static inline void ptx_cp_async_bulk_prefetch_L2_global(T, unsigned) {}
static inline void ptx_griddepcontrol_wait() {}
static inline void ptx_griddepcontrol_launch_dependents() {}

template <class P> static inline void ptx_atom_acq_rel_gpu_global_add_u32(unsigned& before, P to, unsigned x) {
    before = atomicAdd((unsigned*)to, x);
}

// Loads and stores with hints.

template <class T, class P> static inline T emulator_load(P from) { return *(const T*)from; }
#define EMULATOR_LOADS(hints)                                                                                          \
    template <class P> static inline void ptx_ld_global_##hints##v4_u32(unsigned& a, unsigned& b, unsigned& c,         \
                                                                         unsigned& d, P from) {                        \
        uint4 v = emulator_load<uint4>(from);                                                                          \
        a = v.x, b = v.y, c = v.z, d = v.w;                                                                            \
    }                                                                                                                  \
    template <class P> static inline void ptx_ld_global_##hints##v4_f32(float& a, float& b, float& c, float& d,        \
                                                                         P from) {                                     \
        float4 v = emulator_load<float4>(from);                                                                        \
        a = v.x, b = v.y, c = v.z, d = v.w;                                                                            \
    }                                                                                                                  \
    template <class P> static inline void ptx_ld_global_##hints##v2_u32(unsigned& a, unsigned& b, P from) {            \
        uint2 v = emulator_load<uint2>(from);                                                                          \
        a = v.x, b = v.y;                                                                                              \
    }                                                                                                                  \
    template <class P> static inline void ptx_ld_global_##hints##u32(unsigned& a, P from) {                            \
        a = emulator_load<unsigned>(from);                                                                             \
    }                                                                                                                  \
    template <class P> static inline void ptx_ld_global_##hints##f32(float& a, P from) {                               \
        a = emulator_load<float>(from);                                                                                \
    }
EMULATOR_LOADS()
EMULATOR_LOADS(nc_)
EMULATOR_LOADS(cg_)
EMULATOR_LOADS(nc_L1__no_allocate_)
EMULATOR_LOADS(nc_L1__no_allocate_L2__128B_)
EMULATOR_LOADS(nc_L1__no_allocate_L2__256B_)
#undef EMULATOR_LOADS
