//! Measures the time of a token's matrix products on this machine, without the model's weights.
//!
//! Types with few bits are limited by unpacking, types with many by memory bandwidth. So the time is measured and not
//! calculated: the same kernels run on memory of the same types and shapes, on the CPU or on a device that computes from RAM. If the model has enough weights, this memory is
//! larger than the caches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{Buf, BufShape, CpuBackend, HostMatrix, Matrix, Precision, Weight};
use crate::error::Result;
use crate::experts::{Device, ExecutorBuilder};
use crate::memory::{ALIGNMENT, Machine, Region};
use crate::models::Product;

/// Seconds of a token's matrix products, without waiting for the drive.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ComputeTime {
    /// The products with dense weights.
    pub dense: f64,
    /// The products with experts.
    pub experts: f64,
}

/// Bytes of weights per measurement: more than most caches hold.
const TRIAL: u64 = 128 << 20;

/// The duration of each type's measurement.
const DURATION: Duration = Duration::from_millis(250);

/// In a scale of any type, this byte gives a small number that is neither zero nor infinite nor subnormal (which is slow).
const FILLING: u8 = 0x3c;

/// What computes the products.
#[derive(Clone, Copy)]
pub struct Computer<'a> {
    /// The device; `None` for the CPU.
    pub device: Option<&'a dyn Device>,
    /// Threads of the CPU.
    pub threads: usize,
    pub precision: Precision,
}

impl Computer<'_> {
    fn builder(self, buffers: &[BufShape]) -> Result<Box<dyn ExecutorBuilder>> {
        match self.device {
            Some(device) => device.executor(self.precision, buffers),
            None => Ok(Box::new(CpuBackend::new(self.threads, self.precision, buffers)?)),
        }
    }
}

/// The seconds of these products.
///
/// # Errors
/// If memory cannot be allocated, threads cannot be started, or the device fails.
pub fn rehearse(products: &[Product], computer: Computer<'_>) -> Result<f64> {
    let mut seconds = 0.0;
    for product in products {
        seconds += product.read as f64 / speed(product, computer)?;
    }
    Ok(seconds)
}

/// Bytes of weights per second.
fn speed(product: &Product, computer: Computer<'_>) -> Result<f64> {
    let Product { encoding, rows, cols, together, stored, .. } = *product;
    let planes = encoding.plane_bytes(rows, cols).expect("the model has such a matrix");
    let bytes: usize = planes.iter().sum();
    let most = Machine::now().available.map_or(TRIAL, |available| TRIAL.min(available / 4));
    let count = (stored.min(most) as usize / bytes).max(together);
    let size = planes.map(|plane| plane.next_multiple_of(ALIGNMENT));
    let mut region = Region::new(count * size.iter().sum::<usize>())?;
    region.fill(FILLING);
    let region = Arc::new(region);

    let shape = |width| BufShape { rows: 1, width };
    let mut shapes = vec![shape(cols)];
    shapes.resize(1 + together, shape(rows));
    let mut builder = computer.builder(&shapes)?;
    let backend = builder.backend();
    let mut end = 0;
    for _ in 0..count {
        let planes = [0, 1, 2].map(|plane| {
            let start = end;
            end += size[plane];
            region.share(start..start + planes[plane])
        });
        backend.load(Weight::Matrix(HostMatrix { encoding, rows, cols, planes, scale: 1.0 }))?;
    }

    let x = Buf { id: 0, width: cols };
    let sets: Vec<Vec<(Matrix, Buf)>> = (0..count / together)
        .map(|set| {
            let each = |i| (Matrix(set * together + i), Buf { id: 1 + i, width: rows });
            (0..together).map(each).collect()
        })
        .collect();
    let (last, mut result) = (Buf { id: together, width: rows }, vec![0.0; rows]);
    let mut pass = || -> Result<()> {
        backend.begin(1);
        sets.iter().try_for_each(|set| backend.matmul(x, set))?;
        // A device has computed when a result has been read.
        backend.read(last, &mut result)
    };
    // The first pass warms caches and threads.
    pass()?;
    let start = Instant::now();
    let mut times = Vec::new();
    while times.is_empty() || start.elapsed() < DURATION {
        let start = Instant::now();
        pass()?;
        times.push(start.elapsed());
    }
    // The median ignores passes in which another program had a CPU.
    times.sort_unstable();
    let median = times[times.len() / 2];
    Ok((sets.len() * together * bytes) as f64 / median.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_kernels::{Affine, DType, Encoding, Tiles};

    #[test]
    fn every_encoding_can_be_tried() {
        let mut encodings: Vec<Encoding> = DType::computable().map(Encoding::from).collect();
        encodings.push(Encoding::Affine(Affine { bits: 4, group: 64, scales: DType::BF16 }));
        encodings.push(Encoding::Tiles(Tiles { rows: 128, cols: 128, scales: DType::F32 }));
        encodings.extend([Encoding::Mxfp4, Encoding::Columns(DType::BF16)]);
        for encoding in encodings {
            let product = Product { encoding, rows: 64, cols: 256, together: 2, read: 1000, stored: 1 };
            for precision in [Precision::Fast, Precision::Exact] {
                let seconds = rehearse(&[product], Computer { device: None, threads: 1, precision }).unwrap();
                assert!(seconds > 0.0 && seconds.is_finite(), "{encoding}");
            }
        }
    }
}
