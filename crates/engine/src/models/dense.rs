//! Loading the dense weights of a blueprint: from the file into one region, and from there into a backend.

use std::ops::Range;
use std::sync::Arc;

use forebay_kernels::quant::dequantise_row;
use forebay_kernels::{MatRef, Planes};

use super::blueprint::Blueprint;
use super::declared::Declared;
use crate::backend::{Backend, HostMatrix, Weight};
use crate::error::Result;
use crate::experts::{ByteRange, ByteSource};
use crate::memory::{ALIGNMENT, Region};

impl Blueprint {
    /// Reads the dense weights into one region and loads them into the backend. `progress` receives the bytes of each
    /// tensor.
    ///
    /// # Errors
    /// If reading, the backend or `progress` fails.
    pub fn load_dense(
        &self,
        source: &dyn ByteSource,
        backend: &mut dyn Backend,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Arc<Region>> {
        let (places, end) = self.dense_places();
        let mut region = Region::new(end)?;
        for (range, place) in &places {
            source.read_exact_at(range.file, range.offset, &mut region[place.clone()])?;
            progress(range.len as u64)?;
        }
        let region = Arc::new(region);
        self.hand_over(&region, backend)?;
        Ok(region)
    }

    /// Loads the dense weights, which are in `region`, into a backend.
    pub fn hand_over(&self, region: &Arc<Region>, backend: &mut dyn Backend) -> Result<()> {
        let all = self.dense_places().0;
        let mut places = all.iter().map(|(_, place)| place.clone());
        let mut next = || places.next().expect("every range has a place");
        for declared in &self.weights {
            backend.load(match declared {
                Declared::Matrix(m) | Declared::Table(m) => Weight::Matrix(HostMatrix {
                    encoding: m.encoding,
                    rows: m.rows,
                    cols: m.cols,
                    planes: m.ranges.map(|range| region.share(range.map_or(0..0, |_| next()))),
                    scale: m.scale.map_or(1.0, |_| scale_of(&region[next()])),
                }),
                Declared::Vector(t, prepared) => {
                    let mut values = vec![0.0; t.elements() as usize];
                    dequantise_row(t.dtype, &region[next()], &mut values);
                    Weight::Vector(prepared.apply(values))
                }
                Declared::Constant(value, count) => Weight::Vector(vec![*value; *count]),
                Declared::InverseColumnLengths(matrix) => {
                    let bytes = |range: Option<ByteRange>| {
                        let place = range.and_then(|range| all.iter().find(|(known, _)| *known == range));
                        place.map_or(&[][..], |(_, place)| &region[place.clone()])
                    };
                    let [codes, scales, biases] = matrix.ranges.map(bytes);
                    let planes = Planes { codes, scales, biases };
                    let scale = matrix.scale.map_or(1.0, |scale| scale_of(bytes(Some(scale))));
                    let matrix = MatRef::from_planes(matrix.encoding, matrix.rows, matrix.cols, planes);
                    Weight::Vector(inverse_column_lengths(matrix, scale))
                }
            })?;
        }
        Ok(())
    }

    /// The place of each range of the dense weights in the region, and the region's length. There is one region, so
    /// that small tensors share huge pages.
    fn dense_places(&self) -> (Vec<(ByteRange, Range<usize>)>, usize) {
        let mut end = 0;
        let mut place = |range: ByteRange| {
            let start = end;
            end = (start + range.len).next_multiple_of(ALIGNMENT);
            (range, start..start + range.len)
        };
        let places = self.weights.iter().flat_map(Declared::ranges).map(&mut place).collect();
        (places, end)
    }
}

/// The factor of a matrix.
fn scale_of(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().expect("a scale has four bytes"))
}

/// The reciprocal of the length of each column of a matrix whose factor is `scale`.
fn inverse_column_lengths(matrix: MatRef<'_>, scale: f32) -> Vec<f32> {
    let mut squares = vec![0.0f64; matrix.cols];
    let mut row = vec![0.0; matrix.cols];
    for r in 0..matrix.rows {
        matrix.dequantise_row(r, &mut row);
        squares.iter_mut().zip(&row).for_each(|(square, &x)| *square += f64::from(x * scale).powi(2));
    }
    // The models' own code adds this.
    const EPSILON: f64 = 1e-7;
    squares.into_iter().map(|square| (1.0 / (square.sqrt() + EPSILON)) as f32).collect()
}
