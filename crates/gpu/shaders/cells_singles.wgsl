
// Four numbers of type f32.
alias Cell = vec4<f32>;
const CELL_BYTES: u32 = 16u;
fn floats_of(cell: Cell) -> vec4<f32> { return cell; }
fn cell_of(floats: vec4<f32>) -> Cell { return floats; }
