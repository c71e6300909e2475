// The tensor cores: 16 by 16 f16 times 16 by 8 f16, added up in f32.

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ inline void load_four(u32 (&r)[4], const u16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

__device__ inline void load_two(u32 (&r)[2], const u16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(p)));
}

__device__ inline void multiply_add(float (&d)[4], const u32 (&a)[4], const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Like load_four, with each of the four squares transposed.
__device__ inline void load_four_transposed(u32 (&r)[4], const u16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

// Two f16 in each word.
__device__ inline u32 add_halves(u32 a, u32 b) {
    u32 both;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

__device__ inline u32 multiply_halves(u32 a, u32 b) {
    u32 both;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

__device__ inline u32 fma_halves(u32 a, u32 b, u32 c) {
    u32 both;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
    return both;
}

// Starts to copy 16 bytes to shared memory. They have arrived after await_copies.
__device__ inline void copy_sixteen(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Waits for the copies that this thread started.
__device__ inline void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
