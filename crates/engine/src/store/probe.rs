//! How fast the drive delivers experts, measured and not looked up.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::io::{self, IoMethod, Priority, Read};
use super::slots::{Numbering, Placement};
use super::{ByteRange, ExpertLayer};
use crate::error::{Error, Result};
use crate::format::ModelFile;
use crate::memory::Region;

/// Experts that are asked for at a time, as a layer asks for them.
const TOGETHER: usize = 8;

/// Bytes a second while experts from all over the model are read for so long; `None` if there are none.
pub fn drive_speed(
    model: &ModelFile,
    layers: &[Option<ExpertLayer>],
    method: IoMethod,
    duration: Duration,
) -> Result<Option<f64>> {
    let numbering = Numbering::new(layers);
    if numbering.count() == 0 {
        return Ok(None);
    }
    let ranges = |expert: usize| -> &[ByteRange] {
        let (layer, index) = numbering.place(expert);
        &layers[layer].as_ref().expect("it has experts").experts[index]
    };
    let slot_bytes = (0..numbering.count()).map(|e| Placement::new(ranges(e)).bytes).max().unwrap_or(0);
    let mut region = Region::new(TOGETHER * slot_bytes)?;
    // Fresh pages would cost time that the drive has no part in.
    region.fill(1);
    let region = Arc::new(region);
    let (sender, done) = channel();
    let memory = Arc::clone(&region);
    let reader = io::open(
        model,
        method,
        &[],
        Arc::new(move |_, result| {
            let _ = &memory;
            // Nobody listens any more when the probe has failed.
            let _ = sender.send(result);
        }),
    )?;
    let (start, mut bytes, mut next) = (Instant::now(), 0, 0);
    while start.elapsed() < duration {
        let mut reads = Vec::new();
        for slot in 0..TOGETHER {
            // A stride by the golden ratio visits places all over the file, and none twice in a row.
            next = (next + numbering.count() * 619 / 1000 + 1) % numbering.count();
            let ranges = ranges(next);
            for (part, extent) in Placement::new(ranges).extents.iter().enumerate() {
                reads.push(Read {
                    id: super::read_id(slot, part),
                    file: ranges[part].file,
                    offset: extent.offset,
                    to: region.as_ptr().wrapping_add(slot * slot_bytes + extent.place),
                    len: extent.len,
                    needed: extent.lead + extent.part,
                });
                bytes += extent.len as u64;
            }
        }
        // SAFETY: the region is initialised, nobody else uses it, and the reader's callback keeps it alive.
        unsafe { reader.submit(&reads, Priority::Demand) };
        for _ in &reads {
            done.recv().map_err(|_| Error::Backend("the reader has ended".into()))??;
        }
    }
    Ok(Some(bytes as f64 / start.elapsed().as_secs_f64()))
}
