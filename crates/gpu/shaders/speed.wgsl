
// Reads memory, to measure how fast that is.

@group(0) @binding(#) var<storage, read> all: array<vec4<u32>>;
@group(0) @binding(#) var<storage, read_write> out: array<u32>;

// Each workgroup reads 64 KiB.
@compute @workgroup_size(256)
fn read_all(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    var bits = vec4<u32>(0u);
    for (var i = 0u; i < 16u; i++) { bits |= all[4096u * group.x + 256u * i + thread]; }
    // The memory has zeros, which a compiler does not know.
    if any(bits != vec4<u32>(0u)) { out[0] = bits.x; }
}
