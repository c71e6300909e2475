
// Experts of many rows of activations: each workgroup computes 64 rows of every matrix for a tile of up to TOKENS places,
// 32 columns after 32.

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

const THREADS: u32 = 4u * TOKENS;
const QUARTER: u32 = TOKENS / 4u;

// Where in x each place's row starts.
var<workgroup> starts: array<u32, TOKENS>;

// Of each column, the activations of TOKENS places. Their order is permuted, so that neighbouring threads, which load
// different columns, use different banks.
var<workgroup> activations: array<vec4<f32>, 8u * TOKENS>;

//each {
// Of each column, the weights of 64 rows of slot $.
var<workgroup> columns$: array<vec4<f32>, 512>;

// Unpacks 32 columns of a row.
fn load_weights$(number: u32, first: u32, index: u32) {
    let m = matrices[args.matrix$];
    let g = unpack$(m, planes_in(m, args.ranges$), min(first + number, m.rows - 1u), index);
    let four = number / 4u;
    let one = number % 4u;
    for (var i = 0u; i < 8u; i++) {
        var lanes = g.scale[i / 4u] * g.lanes[i];
        if HAS_MIN$ { lanes = fma(vec4<f32>(g.scale[i / 4u]), g.lanes[i], vec4<f32>(g.min[i / 4u])); }
        columns$[64u * i + four][one] = lanes.x;
        columns$[64u * i + 16u + four][one] = lanes.y;
        columns$[64u * i + 32u + four][one] = lanes.z;
        columns$[64u * i + 48u + four][one] = lanes.w;
    }
}
//}

fn load_activations(thread: u32, cols: u32, column: u32) {
    for (var i = thread; i < 8u * TOKENS; i += THREADS) {
        let four = i % 8u;
        let place = i / 8u;
        var values = vec4<f32>(0.0);
        let at = column + 4u * four;
        if at < cols { values = x_four(starts[place] + at, cols - at); }
        let to = 4u * QUARTER * four + ((place / 4u) ^ four);
        activations[to][place % 4u] = values.x;
        activations[to + QUARTER][place % 4u] = values.y;
        activations[to + 2u * QUARTER][place % 4u] = values.z;
        activations[to + 3u * QUARTER][place % 4u] = values.w;
    }
}

@compute @workgroup_size(THREADS)
fn tiles(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let job = job_of(group.y);
    if job.count == 0u || !find(job.expert, args.first) { return; }
    let cols = matrices[args.matrix0].cols;
    let first = 64u * group.x;
    if thread < TOKENS { starts[thread] = source_of(job.first + min(thread, job.count - 1u)) * args.x_width; }
    workgroupBarrier();
    let rows = thread % 16u;
    let places = thread / 16u;
//each {
    var sums$ = array<vec4<f32>, 4>(); // of four places, each with four rows
//}
    for (var index = 0u; 32u * index < cols; index++) {
//each {
        if thread / 64u == $u { load_weights$(thread % 64u, first, index); }
//}
        load_activations(thread, cols, 32u * index);
        workgroupBarrier();
        for (var k = 0u; k < 32u; k++) {
            let a = activations[QUARTER * k + (places ^ (k / 4u))];
//each {
            let w$ = columns$[16u * k + rows];
            sums$[0] = fma(w$, vec4<f32>(a.x), sums$[0]);
            sums$[1] = fma(w$, vec4<f32>(a.y), sums$[1]);
            sums$[2] = fma(w$, vec4<f32>(a.z), sums$[2]);
            sums$[3] = fma(w$, vec4<f32>(a.w), sums$[3]);
//}
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i++) {
        let place = 4u * places + i;
        for (var r = 0u; place < job.count && r < 4u; r++) {
            var products = vec2<f32>(0.0);
//each {
            products[$] = sums$[i][r];
//}
            finish(job.expert, job.first + place, first + 4u * rows + r, products);
        }
    }
}
