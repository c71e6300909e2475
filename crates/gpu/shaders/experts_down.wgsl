
// The second half of experts: the product with down, for each place.

struct Args {
    first: u32, // the first arena that is bound
    x_width: u32,
    top_k: u32,
    matrix0: u32,
    ranges0: u32,
    biased: u32,
    scaled: u32,
}
var<immediate> args: Args;

@group(0) @binding(#) var<storage, read> weights: array<f32>; // [rows, top_k], for sums
@group(0) @binding(#) var<storage, read> bias: array<f32>;    // [experts, rows]
@group(0) @binding(#) var<storage, read> scale: array<f32>;   // [experts]

// The row of x for a place.
fn source_of(place: u32) -> u32 { return place; }

// What is done to a product.
fn finished(expert: u32, row: u32, product: f32) -> f32 {
    let rows = matrices[args.matrix0].rows;
    var factor = 1.0;
    var summand = 0.0;
    if args.scaled == 1u { factor = scale[expert]; }
    if args.biased == 1u && row < rows { summand = bias[expert * rows + row]; }
    return fma(product, factor, summand);
}

// Stores the product of a row.
fn finish(expert: u32, place: u32, row: u32, products: vec2<f32>) {
    let rows = matrices[args.matrix0].rows;
    if row < rows { out[place * rows + row] = finished(expert, row, products[0]); }
}
