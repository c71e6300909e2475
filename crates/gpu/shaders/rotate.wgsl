
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

// One workgroup for each head of queries, then for each of keys. A thread reads and writes the same channels.
@compute @workgroup_size(64)
fn norm_and_rotate(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let of_k = group.x >= args.q_heads;
    let heads = select(args.q_heads, args.k_heads, of_k);
    let head = select(group.x, group.x - args.q_heads, of_k);
    let at = (group.y * heads + head) * args.dim;
    let pairs = args.dim - args.half;
    let normed = select(args.q_normed, args.k_normed, of_k) != 0u;
    var squares = 0.0;
    for (var i = thread; i < pairs; i += 64u) {
        let both = pair(i);
        let x = channel(of_k, at + both.x);
        let y = channel(of_k, at + both.y);
        squares = fma(x, x, squares);
        if both.x != both.y { squares = fma(y, y, squares); }
    }
    let scale = 1.0 / sqrt(sum_threads(thread, squares, 64u) / f32(args.dim) + args.eps);
    for (var i = thread; i < pairs; i += 64u) {
        let both = pair(i);
        var x = channel(of_k, at + both.x);
        var y = channel(of_k, at + both.y);
        if normed {
            x *= scale * weight(of_k, both.x);
            y *= scale * weight(of_k, both.y);
        }
        if both.x == both.y {
            set_channel(of_k, at + both.x, x);
            continue;
        }
        let from_angle = group.y * 2u * args.half + i;
        let cosine = angles[from_angle];
        let sine = angles[from_angle + args.half];
        set_channel(of_k, at + both.x, x * cosine - y * sine);
        set_channel(of_k, at + both.y, y * cosine + x * sine);
    }
}
