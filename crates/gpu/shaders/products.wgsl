
// Products of matrices with one or a few rows of activations: TOKENS rows of these at a time, ROWS rows of a matrix for
// each 32 threads. The order of sums depends on neither.

struct Args {
    x_width: u32, // floats between rows of x
    cols: u32,
    tokens: u32,  // rows of x
    eps: f32,     // of the norm
//each {
    matrix$: u32,
    width$: u32, // floats between rows of the output
    end$: u32,   // the first workgroup after those of this product
//}
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> matrices: array<Matrix>;
@group(0) @binding(#) var<storage, read> x: array<f32>;
//each {
@group(0) @binding(#) var<storage, read_write> out$: array<f32>;
//}
//when NORM {
@group(0) @binding(#) var<storage, read> added: array<f32>;
@group(0) @binding(#) var<storage, read> norm: array<f32>;
@group(0) @binding(#) var<storage, read_write> sum_out: array<f32>;
@group(0) @binding(#) var<storage, read_write> normed: array<f32>;
//}

// Columns whose activations are in the workgroup's memory at a time.
const CHUNK: u32 = 4096u / TOKENS;
const GROUPS: u32 = CHUNK / 32u;

// For each 32 columns of a row nine fours: the columns, and the sum of each eight. So neighbouring threads, each of which
// reads its own 32 columns, use different banks.
var<workgroup> staged: array<vec4<f32>, 1152>;

fn place_of(token: u32, column: u32) -> u32 { return 36u * (GROUPS * token + column / 32u) + column % 32u; }

//unless NORM {
// Loads the columns of a chunk.
fn stage(group: vec3<u32>, thread: u32, chunk: u32) {
    for (var t = 0u; t < TOKENS; t++) {
        let token = min(TOKENS * group.y + t, args.tokens - 1u);
        for (var i = thread; i < CHUNK; i += 256u) {
            if chunk + i >= (args.cols + 31u) / 32u * 32u { break; }
            var value = 0.0;
            if chunk + i < args.cols { value = x[token * args.x_width + chunk + i]; }
            let place = place_of(t, i);
            staged[place / 4u][place % 4u] = value;
        }
    }
}
//}
//when NORM {
// Loads a row, adds to it and norms it, as the kernels in rows.wgsl do. The first workgroup stores the results.
fn stage(group: vec3<u32>, thread: u32, chunk: u32) {
    let at = group.y * args.x_width;
    var squares = 0.0;
    for (var i = thread; i < (args.cols + 31u) / 32u * 32u; i += 256u) {
        var value = 0.0;
        if i < args.cols {
            value = x[at + i];
            if ADDED != 0u {
                value += added[at + i];
                if group.x == 0u { sum_out[at + i] = value; }
            }
        }
        squares = fma(value, value, squares);
        let place = place_of(0u, i);
        staged[place / 4u][place % 4u] = value;
    }
    let scale = 1.0 / sqrt(sum_threads(thread, squares, 256u) / f32(args.cols) + args.eps);
    for (var i = thread; i < args.cols; i += 256u) {
        let place = place_of(0u, i);
        let value = staged[place / 4u][place % 4u] * scale * norm[i];
        staged[place / 4u][place % 4u] = value;
        if group.x == 0u { normed[at + i] = value; }
    }
}
//}

// Adds up each eight columns, for minima.
fn stage_sums(thread: u32) {
    for (var i = thread; i < 4u * GROUPS * TOKENS; i += 256u) {
        let at = 9u * (i / 4u);
        let eight = staged[at + 2u * (i % 4u)] + staged[at + 2u * (i % 4u) + 1u];
        staged[at + 8u][i % 4u] = (eight.x + eight.y) + (eight.z + eight.w);
    }
}

// The product of 16 lanes and the staged columns from a four on.
fn dot_16(a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>, at: u32) -> f32 {
    var products = a * staged[at];
    products = fma(b, staged[at + 1u], products);
    products = fma(c, staged[at + 2u], products);
    products = fma(d, staged[at + 3u], products);
    return (products.x + products.y) + (products.z + products.w);
}

// Each thread's sums: of every 32nd group of ROWS rows, with TOKENS rows of activations.
var<private> parts: array<f32, ROWS * TOKENS>;

//each {
fn add_products$(first: u32, chunk: u32, lane: u32) {
    let m = matrices[args.matrix$];
    let groups = (min(args.cols - chunk, CHUNK) + 31u) / 32u;
    for (var index = lane; index < groups; index += 32u) {
        for (var r = 0u; r < ROWS; r++) {
            let g = unpack$(m, planes_of(m), min(first + r, m.rows - 1u), chunk / 32u + index);
            for (var t = 0u; t < TOKENS; t++) {
                let at = 9u * (GROUPS * t + index);
                var sum = parts[r * TOKENS + t];
                sum = fma(g.scale.x, dot_16(g.lanes[0], g.lanes[1], g.lanes[2], g.lanes[3], at), sum);
                sum = fma(g.scale.y, dot_16(g.lanes[4], g.lanes[5], g.lanes[6], g.lanes[7], at + 4u), sum);
                if HAS_MIN$ {
                    let eights = staged[at + 8u];
                    sum = fma(g.min.x, eights.x + eights.y, sum);
                    sum = fma(g.min.y, eights.z + eights.w, sum);
                }
                parts[r * TOKENS + t] = sum;
            }
        }
    }
}
fn store$(row: u32, token: u32, value: f32) {
    let m = matrices[args.matrix$];
    if row < m.rows && token < args.tokens { out$[token * args.width$ + row] = value * m.factor; }
}
//}

@compute @workgroup_size(256)
fn matvec(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let lane = thread % 32u;
    for (var i = 0u; i < ROWS * TOKENS; i++) { parts[i] = 0.0; }
    for (var chunk = 0u; chunk < args.cols; chunk += CHUNK) {
        stage(group, thread, chunk);
        workgroupBarrier();
        if ANY_MIN != 0u {
            stage_sums(thread);
            workgroupBarrier();
        }
        var first = 0u;
//each {
        if group.x >= first && group.x < args.end$ {
            add_products$(ROWS * (8u * (group.x - first) + thread / 32u), chunk, lane);
        }
        first = args.end$;
//}
        workgroupBarrier();
    }
    for (var i = 0u; i < ROWS * TOKENS; i++) {
        let sum = sum_32(thread, parts[i]);
        if lane != i { continue; }
        let token = TOKENS * group.y + i % TOKENS;
        var first = 0u;
//each {
        if group.x >= first && group.x < args.end$ {
            store$(ROWS * (8u * (group.x - first) + thread / 32u) + i / TOKENS, token, sum);
        }
        first = args.end$;
//}
    }
}
