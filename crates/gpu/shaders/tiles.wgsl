
// Products of matrices with many rows of activations: each workgroup computes 64 rows of a matrix with TOKENS rows of
// activations, 32 columns after 32.

struct Args {
    x_width: u32, // floats between rows of x
    cols: u32,
    tokens: u32,  // rows of x
//each {
    matrix$: u32,
    width$: u32, // floats between rows of the output
    end$: u32,   // the first workgroup after those of this product
//}
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> matrices: array<Matrix>;
//when WIDE {
@group(0) @binding(#) var<storage, read> x: array<vec4<f32>>;
fn x_four(at: u32, left: u32) -> vec4<f32> { return x[at / 4u]; }
//}
//unless WIDE {
@group(0) @binding(#) var<storage, read> x: array<f32>;
fn x_four(at: u32, left: u32) -> vec4<f32> {
    var four = vec4<f32>(0.0);
    for (var i = 0u; i < min(left, 4u); i++) { four[i] = x[at + i]; }
    return four;
}
//}
//each {
@group(0) @binding(#) var<storage, read_write> out$: array<f32>;
//}

const THREADS: u32 = 4u * TOKENS;
const QUARTER: u32 = TOKENS / 4u;

// Of each column, the weights of 64 rows and the activations of TOKENS. The latter's places are permuted, so that
// neighbouring threads, which load different columns, use different banks.
var<workgroup> weights: array<vec4<f32>, 512>;
var<workgroup> activations: array<vec4<f32>, 8u * TOKENS>;

//each {
// Unpacks 32 columns of a row.
fn load_weights$(thread: u32, first: u32, index: u32) {
    let m = matrices[args.matrix$];
    let g = unpack$(m, planes_of(m), min(first + thread, m.rows - 1u), index);
    let four = thread / 4u;
    let one = thread % 4u;
    for (var i = 0u; i < 8u; i++) {
        var lanes = g.scale[i / 4u] * g.lanes[i];
        if HAS_MIN$ { lanes = fma(vec4<f32>(g.scale[i / 4u]), g.lanes[i], vec4<f32>(g.min[i / 4u])); }
        weights[64u * i + four][one] = lanes.x;
        weights[64u * i + 16u + four][one] = lanes.y;
        weights[64u * i + 32u + four][one] = lanes.z;
        weights[64u * i + 48u + four][one] = lanes.w;
    }
}
fn store$(rows: u32, token: u32, values: vec4<f32>) {
    let m = matrices[args.matrix$];
    if token >= args.tokens { return; }
    for (var r = 0u; r < 4u; r++) {
        if rows + r < m.rows { out$[token * args.width$ + rows + r] = values[r] * m.factor; }
    }
}
//}

fn load_activations(loader: u32, loaders: u32, first: u32, column: u32) {
    for (var i = loader; i < 8u * TOKENS; i += loaders) {
        let four = i % 8u;
        let token = i / 8u;
        var values = vec4<f32>(0.0);
        let at = column + 4u * four;
        if first + token < args.tokens && at < args.cols {
            values = x_four((first + token) * args.x_width + at, args.cols - at);
        }
        let place = 4u * QUARTER * four + ((token / 4u) ^ four);
        activations[place][token % 4u] = values.x;
        activations[place + QUARTER][token % 4u] = values.y;
        activations[place + 2u * QUARTER][token % 4u] = values.z;
        activations[place + 3u * QUARTER][token % 4u] = values.w;
    }
}

@compute @workgroup_size(THREADS)
fn tiles(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let rows = thread % 16u;
    let tokens = thread / 16u;
    var sums = array<vec4<f32>, 4>(); // of four tokens, each with four rows
    for (var index = 0u; 32u * index < args.cols; index++) {
        if thread < 64u {
            var first = 0u;
//each {
            if group.x >= first && group.x < args.end$ { load_weights$(thread, 64u * (group.x - first), index); }
            first = args.end$;
//}
        } else {
            load_activations(thread - 64u, THREADS - 64u, TOKENS * group.y, 32u * index);
        }
        workgroupBarrier();
        for (var k = 0u; k < 32u; k++) {
            let w = weights[16u * k + rows];
            let a = activations[QUARTER * k + (tokens ^ (k / 4u))];
            sums[0] = fma(w, vec4<f32>(a.x), sums[0]);
            sums[1] = fma(w, vec4<f32>(a.y), sums[1]);
            sums[2] = fma(w, vec4<f32>(a.z), sums[2]);
            sums[3] = fma(w, vec4<f32>(a.w), sums[3]);
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i++) {
        let token = TOKENS * group.y + 4u * tokens + i;
        var first = 0u;
//each {
        if group.x >= first && group.x < args.end$ { store$(64u * (group.x - first) + 4u * rows, token, sums[i]); }
        first = args.end$;
//}
    }
}
