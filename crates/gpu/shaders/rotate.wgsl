
// Norms and rotations of the heads of queries and keys.

struct Args {
    q_heads: u32,
    k_heads: u32,
    dim: u32,
    half: u32, // pairs of channels that rotate
    interleaved: u32, // whether neighbours rotate together
    q_normed: u32,
    k_normed: u32,
    eps: f32,
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read_write> q: array<f32>;
@group(0) @binding(#) var<storage, read_write> k: array<f32>;
@group(0) @binding(#) var<storage, read> q_norm: array<f32>;
@group(0) @binding(#) var<storage, read> k_norm: array<f32>;
@group(0) @binding(#) var<storage, read> angles: array<f32>; // [rows, cos... | sin...]

fn channel(of_k: bool, i: u32) -> f32 {
    if of_k { return k[i]; }
    return q[i];
}

fn set_channel(of_k: bool, i: u32, value: f32) {
    if of_k { k[i] = value; } else { q[i] = value; }
}

fn weight(of_k: bool, i: u32) -> f32 {
    if of_k { return k_norm[i]; }
    return q_norm[i];
}

// Channels of a head that rotate together, or one that does not rotate: then both are the same.
fn pair(i: u32) -> vec2<u32> {
    if i >= args.half { return vec2<u32>(args.half + i); }
    if args.interleaved != 0u { return vec2<u32>(2u * i, 2u * i + 1u); }
    return vec2<u32>(i, i + args.half);
}

// 16 threads for each head of queries, then for each of keys.
@compute @workgroup_size(64)
fn norm_and_rotate(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let number = 4u * group.x + thread / 16u;
    let is_one = number < args.q_heads + args.k_heads;
    let of_k = number >= args.q_heads;
    let heads = select(args.q_heads, args.k_heads, of_k);
    let at = (group.y * heads + number - select(0u, args.q_heads, of_k)) * args.dim;
    let lane = thread % 16u;
    let normed = select(args.q_normed, args.k_normed, of_k) != 0u;
    // Four channels after the other, as where attention prepares heads itself.
    var squares = 0.0;
    for (var i = 4u * lane; is_one && i < args.dim; i += 64u) {
        for (var c = i; c < min(i + 4u, args.dim); c++) {
            let x = channel(of_k, at + c);
            squares = fma(x, x, squares);
        }
    }
    let scale = 1.0 / sqrt(sum_threads(thread, squares, 16u) / f32(args.dim) + args.eps);
    // From here on, other threads write what this one has read.
    storageBarrier();
    workgroupBarrier();
    for (var i = lane; is_one && i < args.dim - args.half; i += 16u) {
        let both = pair(i);
        var x = channel(of_k, at + both.x);
        var y = channel(of_k, at + both.y);
        if normed {
            x = x * scale * weight(of_k, both.x);
            y = y * scale * weight(of_k, both.y);
        }
        if both.x == both.y {
            set_channel(of_k, at + both.x, x);
            continue;
        }
        let from_angle = group.y * 2u * args.half + i;
        let cosine = angles[from_angle];
        let sine = angles[from_angle + args.half];
        set_channel(of_k, at + both.x, fma(x, cosine, -(y * sine)));
        set_channel(of_k, at + both.y, fma(y, cosine, x * sine));
    }
}
