//! Measures the speed at which the drive delivers experts.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::experts::ExpertLayer;
use crate::experts::io::{self, BLOCK, IoMethod, Priority, Read, Reader};
use crate::experts::slots::{Extent as SlotExtent, Placement};
use crate::format::{FileIdx, ModelFile};
use crate::memory::Region;

/// Reads experts from all parts of a model's files in the way of the expert store: past the page cache.
pub struct DriveProbe {
    reader: Box<dyn Reader>,
    region: Arc<Region>,
    done: Receiver<Result<()>>,
    /// The byte ranges of each expert.
    experts: Vec<Vec<Extent>>,
    slot_bytes: usize,
    next: usize,
}

/// Blocks of a file.
struct Extent {
    file: FileIdx,
    offset: u64,
    /// Their offset in the expert's part of the region.
    place: usize,
    len: usize,
    needed: usize,
}

impl DriveProbe {
    /// The most experts that are read at a time: as many as a layer requests.
    pub const MOST_TOGETHER: usize = 8;

    /// A probe of the drives that hold a model's experts; `None` if it has none.
    ///
    /// # Errors
    /// If the files cannot be opened or the method is not available.
    pub fn of_experts(
        model: &ModelFile,
        layers: &[Option<ExpertLayer>],
        method: IoMethod,
    ) -> Result<Option<DriveProbe>> {
        let expert = |ranges: &crate::experts::Ranges| {
            let extents = Placement::new(ranges).extents;
            let extent = |(range, e): (&crate::experts::ByteRange, &SlotExtent)| Extent {
                file: range.file,
                offset: e.offset,
                place: e.place,
                len: e.len,
                needed: e.lead + e.part,
            };
            ranges.iter().zip(&extents).map(extent).collect()
        };
        let experts: Vec<Vec<Extent>> =
            layers.iter().flatten().flat_map(|layer| &layer.experts).map(expert).collect();
        if experts.is_empty() {
            return Ok(None);
        }
        let paths: Vec<PathBuf> = model.files.iter().map(|part| part.path.clone()).collect();
        DriveProbe::new(&paths, experts, method).map(Some)
    }

    /// A probe of the drive that holds a file of `len` bytes, in reads of `size` bytes.
    ///
    /// # Errors
    /// If the file cannot be opened, is shorter than a read, or the method is not available.
    pub fn of_file(path: PathBuf, len: u64, size: usize, method: IoMethod) -> Result<DriveProbe> {
        let size = size.next_multiple_of(BLOCK);
        let read = |number: u64| {
            let offset = number * size as u64;
            vec![Extent { file: FileIdx(0), offset, place: 0, len: size, needed: size }]
        };
        let reads: Vec<_> = (0..len / size as u64).map(read).collect();
        if reads.is_empty() {
            return Err(Error::Invalid(format!("{} is too short to measure its drive", path.display())));
        }
        DriveProbe::new(&[path], reads, method)
    }

    fn new(paths: &[PathBuf], experts: Vec<Vec<Extent>>, method: IoMethod) -> Result<DriveProbe> {
        let slot_bytes =
            experts.iter().flat_map(|e| e.last()).map(|last| last.place + last.len).max().unwrap_or(0);
        let mut region = Region::new(DriveProbe::MOST_TOGETHER * slot_bytes)?;
        // Page faults must not count as the drive's time.
        region.fill(1);
        let region = Arc::new(region);
        let (sender, done) = channel();
        let memory = Arc::clone(&region);
        let on_done = Arc::new(move |_, result| {
            let _ = &memory;
            // After a failure of the probe, nobody receives this.
            let _ = sender.send(result);
        });
        let reader = io::open_paths(paths, method, &[], on_done)?;
        Ok(DriveProbe { reader, region, done, experts, slot_bytes, next: 0 })
    }

    /// A description of how bytes are read, and why.
    pub fn how(&self) -> String {
        self.reader.describe()
    }

    /// Bytes that are read for the largest expert.
    pub fn expert_bytes(&self) -> u64 {
        self.slot_bytes as u64
    }

    /// The bytes per second of reading for `duration`, `together` experts at a time.
    ///
    /// # Errors
    /// If reading fails.
    ///
    /// # Panics
    /// If `together` is zero or more than [`MOST_TOGETHER`](Self::MOST_TOGETHER).
    pub fn speed(&mut self, together: usize, duration: Duration) -> Result<f64> {
        assert!((1..=DriveProbe::MOST_TOGETHER).contains(&together));
        let (start, mut bytes) = (Instant::now(), 0);
        loop {
            let mut reads = Vec::new();
            for slot in 0..together {
                // A stride by the golden ratio visits places all over the file, and none twice in a row.
                let count = self.experts.len();
                self.next = (self.next + count * 619 / 1000 + 1) % count;
                for (part, extent) in self.experts[self.next].iter().enumerate() {
                    reads.push(Read {
                        id: crate::experts::read_id(slot, part),
                        file: extent.file,
                        offset: extent.offset,
                        to: self.region.as_ptr().wrapping_add(slot * self.slot_bytes + extent.place),
                        len: extent.len,
                        needed: extent.needed,
                    });
                    bytes += extent.len as u64;
                }
            }
            // SAFETY: the region is initialised, nobody else uses it, and the reader's callback keeps it alive.
            unsafe { self.reader.submit(&reads, Priority::Demand) };
            for _ in &reads {
                self.done.recv().map_err(|_| Error::Backend("the reader has ended".into()))??;
            }
            if start.elapsed() >= duration {
                return Ok(bytes as f64 / start.elapsed().as_secs_f64());
            }
        }
    }
}

/// The bytes per second of reading experts from all parts of the model for `duration`; `None` if it has none.
///
/// # Errors
/// If reading fails.
pub fn drive_speed(
    model: &ModelFile,
    layers: &[Option<ExpertLayer>],
    method: IoMethod,
    duration: Duration,
) -> Result<Option<f64>> {
    let probe = DriveProbe::of_experts(model, layers, method)?;
    probe.map(|mut probe| probe.speed(DriveProbe::MOST_TOGETHER, duration)).transpose()
}
