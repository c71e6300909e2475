//! The expert store over drives that are slow, fail, return short reads, or do not answer.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use forebay_engine::internals::backend::Parts;
use forebay_engine::internals::experts::policy::PolicyKind;
use forebay_engine::internals::experts::{
    Access, Asked, ByteRange, ByteSource, ExpertLayer, ExpertStore, Given, IoMethod, PartShape, Picture,
    Residency, RowPick, Sight, SlotClasses, StoreOptions,
};
use forebay_engine::internals::format::FileIdx;
use forebay_engine::{Error, ExpertIdx, LayerIdx};
use forebay_kernels::DType;

/// Rows of F32 with one column, for each part of an expert.
const ROWS: [usize; 3] = [300, 700, 500];
const EXPERTS: usize = 8;
const LAYERS: usize = 3;

/// A drive of one file whose bytes identify their offsets, and which can misbehave.
#[derive(Default)]
struct Drive {
    /// Reads at and after this offset fail.
    fails_from: Option<u64>,
    /// The length of the file.
    ends_at: Option<u64>,
    repaired: AtomicBool,
    /// While this is set, reads block.
    silent: Mutex<bool>,
    speaks: Condvar,
    reads: AtomicUsize,
}

impl ByteSource for Drive {
    fn read_at(&self, _: FileIdx, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.reads.fetch_add(1, SeqCst);
        let silent = self.silent.lock().unwrap();
        drop(self.speaks.wait_while(silent, |silent| *silent).unwrap());
        let mut len = buffer.len().min(5000);
        if !self.repaired.load(SeqCst) {
            if let Some(end) = self.fails_from {
                len = len.min(end.saturating_sub(offset) as usize);
                if len == 0 {
                    return Err(io::Error::other("medium error"));
                }
            }
            if let Some(end) = self.ends_at {
                len = len.min(end.saturating_sub(offset) as usize);
            }
        }
        for (i, byte) in buffer[..len].iter_mut().enumerate() {
            *byte = byte_at(offset + i as u64);
        }
        Ok(len)
    }

    fn path(&self, _: FileIdx) -> &Path {
        Path::new("drive.gguf")
    }
}

fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// The same part of all experts of a layer is stored together, at unaligned offsets.
fn layers() -> Vec<Option<ExpertLayer>> {
    let mut offset = 100;
    let mut layer = || {
        let starts = ROWS.map(|rows| {
            let start = offset;
            offset += (rows * 4 * EXPERTS) as u64 + 32;
            start
        });
        let range = |part: usize, expert: usize| {
            let len = ROWS[part] * 4;
            ByteRange { file: FileIdx(0), offset: starts[part] + (expert * len) as u64, len }
        };
        ExpertLayer {
            parts: Parts { gate: Some(0), up: 1, down: 2 }.each(|&part: &usize| PartShape {
                encoding: DType::F32.into(),
                rows: ROWS[part],
                cols: 1,
                planes: [Some(part), None, None],
                pick: RowPick::ALL,
            }),
            adjugate: None,
            experts: (0..EXPERTS).map(|e| [range(0, e), range(1, e), range(2, e)].into()).collect(),
            used: 2,
        }
    };
    // A dense layer between them has no experts.
    vec![Some(layer()), None, Some(layer()), Some(layer())]
}

/// The indices of the layers that have experts.
const SPARSE: [usize; LAYERS] = [0, 2, 3];

fn open(drive: &Arc<Drive>, slots: usize) -> ExpertStore {
    open_patient(drive, slots, StoreOptions::PATIENCE)
}

fn open_patient(drive: &Arc<Drive>, slots: usize, patience: Duration) -> ExpertStore {
    let options =
        StoreOptions { slots: vec![slots], io: IoMethod::Pool, policy: PolicyKind::default(), patience };
    let layers = layers();
    let classes = SlotClasses::new(&layers);
    assert_eq!(classes.classes.len(), 1);
    ExpertStore::over(Arc::clone(drive) as Arc<dyn ByteSource>, layers, &classes, &options).unwrap()
}

/// Acquires experts and checks all their bytes.
fn check(store: &ExpertStore, layer: usize, experts: &[u32]) -> Result<(), Error> {
    let wanted: Vec<_> = experts.iter().map(|&e| ExpertIdx(e)).collect();
    let mut acquisition = store.acquire(LayerIdx(layer), &wanted, Access::Token);
    let mut seen = Vec::new();
    while let Some(leases) = acquisition.next_ready()? {
        for lease in &leases {
            seen.push(lease.expert().0);
            for (part, matrix) in lease.weights().parts.iter().enumerate() {
                let range = layers()[layer].as_ref().unwrap().experts[lease.expert().0 as usize][part];
                let bytes = (0..matrix.rows).flat_map(|row| matrix.row(row));
                let expected = (range.offset..range.offset + range.len as u64).map(byte_at);
                assert!(bytes.copied().eq(expected), "layer {layer}, {:?}, matrix {part}", lease.expert());
            }
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, experts);
    Ok(())
}

/// The indices of an expert's matrices.
const UP: usize = 1;
const DOWN: usize = 2;

/// The end of a matrix of an expert in the file.
fn end_of(layer: usize, expert: usize, part: usize) -> u64 {
    let range = layers()[layer].as_ref().unwrap().experts[expert][part];
    range.offset + range.len as u64
}

#[test]
fn every_expert_has_its_own_bytes_however_few_slots_there_are() {
    for slots in [2, 3, 5, 10, LAYERS * EXPERTS] {
        let drive = Arc::new(Drive::default());
        let store = open(&drive, slots);
        let mut random = 1u32;
        for _ in 0..40 {
            for layer in SPARSE {
                store.tick();
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let (a, b) = (random >> 29, (random >> 20) % 8);
                let experts = if a == b { vec![a] } else { vec![a.min(b), a.max(b)] };
                check(&store, layer, &experts).unwrap();
            }
        }
        let meters = store.meters();
        assert!(meters.hits + meters.misses > 100);
        assert!(meters.bytes_read > 0 && meters.bytes_read <= meters.bytes_used);
        if slots == LAYERS * EXPERTS {
            assert_eq!(meters.misses as usize, LAYERS * EXPERTS, "an expert in memory stays");
        }
    }
}

/// Requests all experts of a layer, as a prompt does, with far fewer slots.
#[test]
fn a_whole_layer_passes_through_two_slots() {
    let store = open(&Arc::new(Drive::default()), 2);
    let all: Vec<u32> = (0..EXPERTS as u32).collect();
    for layer in SPARSE {
        check(&store, layer, &all).unwrap();
    }
}

#[test]
fn experts_that_were_preloaded_are_not_read_again() {
    let drive = Arc::new(Drive::default());
    let store = open(&drive, 10);
    let mut bytes = 0;
    // More experts than slots, and one twice.
    let wanted = [3, 3].into_iter().chain(8..LAYERS * EXPERTS);
    store
        .preload(wanted, &mut |n| {
            bytes += n;
            Ok(())
        })
        .unwrap();
    assert_eq!(bytes, 10 * ROWS.iter().map(|rows| *rows as u64 * 4).sum::<u64>());
    let reads = drive.reads.load(SeqCst);
    check(&store, 0, &[3]).unwrap();
    check(&store, 2, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
    check(&store, 3, &[0]).unwrap();
    assert_eq!(drive.reads.load(SeqCst), reads);
    assert_eq!(store.meters().hits, 10);
}

#[test]
fn a_failed_read_names_file_and_offset_and_the_store_works_on() {
    let fails_from = end_of(3, 4, UP) - 100;
    let drive = Arc::new(Drive { fails_from: Some(fails_from), ..Drive::default() });
    let store = open(&drive, 6);
    check(&store, 0, &[1, 5]).unwrap();
    let message = check(&store, 3, &[3, 4]).unwrap_err().to_string();
    assert!(message.starts_with("drive.gguf: cannot read "), "{message}");
    assert!(message.contains("medium error"), "{message}");
    check(&store, 0, &[1, 5, 6]).unwrap();
    drive.repaired.store(true, SeqCst);
    check(&store, 3, &[3, 4]).unwrap();
}

#[test]
fn two_acquisitions_that_wait_for_a_read_both_get_its_error() {
    let drive = Arc::new(Drive { fails_from: Some(end_of(3, 4, UP) - 100), ..Drive::default() });
    let store = open(&drive, 6);
    *drive.silent.lock().unwrap() = true;
    let mut waiting = [0, 1].map(|_| store.acquire(LayerIdx(3), &[ExpertIdx(4)], Access::Token));
    *drive.silent.lock().unwrap() = false;
    drive.speaks.notify_all();
    for acquisition in &mut waiting {
        let message = acquisition.next_ready().err().expect("it cannot come").to_string();
        assert!(message.contains("medium error"), "{message}");
    }
}

#[test]
fn a_file_that_has_shrunk_is_an_error() {
    let drive = Arc::new(Drive { ends_at: Some(end_of(2, 7, DOWN) - 1), ..Drive::default() });
    let store = open(&drive, 4);
    check(&store, 2, &[6]).unwrap();
    let message = check(&store, 2, &[6, 7]).unwrap_err().to_string();
    assert!(message.contains("drive.gguf") && message.contains("the file is too short"), "{message}");
    check(&store, 0, &[0, 1]).unwrap();
}

#[test]
fn a_drive_that_does_not_answer_is_an_error_and_may_recover() {
    let drive = Arc::new(Drive::default());
    let store = open_patient(&drive, 3, Duration::from_secs(1));
    check(&store, 0, &[1]).unwrap();
    *drive.silent.lock().unwrap() = true;
    let message = check(&store, 0, &[1, 2]).unwrap_err().to_string();
    assert!(message.contains("drive.gguf: cannot read 1200 bytes at offset 2500"), "{message}");
    assert!(message.contains("the drive has not answered"), "{message}");
    // Experts in memory are available, and the slot that is being written to is not given to another expert.
    check(&store, 0, &[1]).unwrap();
    *drive.silent.lock().unwrap() = false;
    drive.speaks.notify_all();
    check(&store, 0, &[1, 2]).unwrap();
    check(&store, 3, &[0, 1, 2, 3]).unwrap();
}

#[test]
fn a_dropped_acquisition_leaves_nothing_pinned() {
    let store = open(&Arc::new(Drive::default()), 2);
    for expert in 0..EXPERTS as u32 {
        let mut acquisition = store.acquire(LayerIdx(0), &[ExpertIdx(expert)], Access::Prompt);
        if expert % 2 == 0 {
            drop(acquisition.next_ready().unwrap());
        }
    }
    check(&store, 2, &[0, 1, 2]).unwrap();
}

#[test]
fn with_few_slots_a_tokens_misses_are_read_one_by_one_and_a_prompts_together() {
    let together = |purpose| {
        let store = open(&Arc::new(Drive::default()), 8);
        let wanted = [0, 1, 2].map(ExpertIdx);
        let mut acquisition = store.acquire(LayerIdx(0), &wanted, purpose);
        // Waits until all started reads have arrived.
        let (mut picture, start) = (Picture::default(), Instant::now());
        let mut are_arriving = || {
            store.look(&mut picture);
            picture.experts().iter().any(|sight| sight.place == Residency::Arriving)
        };
        while are_arriving() {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing arrives");
            std::thread::sleep(Duration::from_millis(1));
        }
        acquisition.next_ready().unwrap().unwrap().len()
    };
    assert_eq!(together(Access::Token), 1);
    assert_eq!(together(Access::Prompt), 3);
}

#[test]
fn the_store_works_without_slots_given_back_and_keeps_the_minimum() {
    let store = open(&Arc::new(Drive::default()), LAYERS * EXPERTS);
    store.preload(0..LAYERS * EXPERTS, &mut |_| Ok(())).unwrap();
    let mut acquisition = store.acquire(LayerIdx(3), &[ExpertIdx(7)], Access::Token);
    let lease = acquisition.next_ready().unwrap();
    // All but the two that a layer needs, and not the leased one.
    let given = store.give_back(u64::MAX);
    assert!(given > 0);
    assert_eq!(store.give_back(1), 0, "nothing more can be spared");
    drop(lease);
    drop(acquisition);
    let before = store.meters();
    for layer in SPARSE {
        check(&store, layer, &[0, 1, 6, 7]).unwrap();
    }
    // Two experts stayed in memory; all others are read from the drive again.
    assert!((store.meters() - before).misses >= 10);

    assert_eq!(store.take_again(given), given);
    assert_eq!(store.take_again(u64::MAX), 0, "all are in use again");
    store.preload(0..LAYERS * EXPERTS, &mut |_| Ok(())).unwrap();
    let before = store.meters();
    for layer in SPARSE {
        check(&store, layer, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
    }
    assert_eq!((store.meters() - before).misses, 0, "all experts fit again");
}

/// Only resident memory counts as freed. Slots that were not used since they were taken again free nothing.
#[cfg(target_os = "linux")]
#[test]
fn relief_counts_what_was_in_memory() {
    let store = open(&Arc::new(Drive::default()), LAYERS * EXPERTS);
    store.preload(0..LAYERS * EXPERTS, &mut |_| Ok(())).unwrap();
    store.settle();
    let all = store.slot_bytes();
    let first = store.relieve(1);
    assert!(first.freed > 0 && first.freed == first.slots, "{first:?}");
    assert_eq!(store.slot_bytes(), all - first.slots);
    let rest = store.relieve(u64::MAX);
    assert!(rest.freed == rest.slots && rest.slots > first.slots, "{rest:?}");
    assert_eq!(store.relieve(1), Given::default(), "nothing more can be spared");

    assert_eq!(store.take_again(u64::MAX), first.slots + rest.slots);
    assert_eq!(store.slot_bytes(), all);
    let untouched = store.relieve(1);
    assert_eq!(untouched, Given { freed: 0, slots: first.slots + rest.slots });
}

/// The state of an expert in a picture; `layer` counts only layers with experts.
fn seen(picture: &Picture, layer: usize, expert: usize) -> Sight {
    assert_eq!(picture.experts().len(), LAYERS * EXPERTS);
    picture.experts()[layer * EXPERTS + expert]
}

#[test]
fn a_picture_shows_where_experts_are_and_requests_since_the_last_one() {
    let drive = Arc::new(Drive::default());
    let store = open(&drive, 6);
    let sight = |place, asked| Sight { place, asked };
    store.preload([0, 1].into_iter(), &mut |_| Ok(())).unwrap();
    check(&store, 0, &[0]).unwrap();

    // Requests before the first picture do not count, and two observers do not affect each other.
    let (mut one, mut other) = (Picture::default(), Picture::default());
    store.look(&mut one);
    assert_eq!(seen(&one, 0, 0), sight(Residency::Resident, Asked::Not));
    assert_eq!(seen(&one, 0, 2), sight(Residency::Absent, Asked::Not));
    check(&store, 0, &[0, 2]).unwrap();
    store.look(&mut other);
    store.look(&mut one);
    assert!(other.experts().iter().all(|sight| sight.asked == Asked::Not));
    assert_eq!(seen(&one, 0, 0), sight(Residency::Resident, Asked::Hit));
    assert_eq!(seen(&one, 0, 1), sight(Residency::Resident, Asked::Not));
    assert_eq!(seen(&one, 0, 2), sight(Residency::Resident, Asked::Missed));
    assert_eq!(seen(&other, 0, 2), sight(Residency::Resident, Asked::Not));

    // A hit does not hide an earlier miss, nor a miss a hit. Dense layers are left out.
    check(&store, 3, &[7]).unwrap();
    check(&store, 3, &[7]).unwrap();
    store.look(&mut one);
    assert_eq!(seen(&one, 2, 7), sight(Residency::Resident, Asked::Both));
    assert_eq!(seen(&one, 0, 0), sight(Residency::Resident, Asked::Not));
    check(&store, 3, &[7]).unwrap();
    store.look(&mut one);
    store.look(&mut other);
    assert_eq!(seen(&one, 2, 7), sight(Residency::Resident, Asked::Hit));
    assert_eq!(seen(&other, 2, 7), sight(Residency::Resident, Asked::Both));

    // Being read, while an acquisition waits for it.
    *drive.silent.lock().unwrap() = true;
    let acquisition = store.acquire(LayerIdx(2), &[ExpertIdx(5)], Access::Token);
    store.look(&mut one);
    assert_eq!(seen(&one, 1, 5), sight(Residency::Arriving, Asked::Missed));
    *drive.silent.lock().unwrap() = false;
    drive.speaks.notify_all();
    drop(acquisition);

    // Evicted experts are absent again.
    check(&store, 2, &[0, 1, 2, 3, 4, 6, 7]).unwrap();
    store.look(&mut one);
    let resident = one.experts().iter().filter(|sight| sight.place == Residency::Resident).count();
    assert_eq!(resident, 6);
}

/// As many experts as the largest models have: a picture takes one step for each.
#[test]
fn many_experts_can_be_looked_at_often() {
    const MANY: usize = 256;
    let mut layers = layers();
    let pattern = layers[0].clone().unwrap();
    layers = vec![Some(pattern); 58];
    for layer in layers.iter_mut().flatten() {
        layer.experts = layer.experts.iter().cycle().take(MANY).cloned().collect();
    }
    let classes = SlotClasses::new(&layers);
    let options = StoreOptions {
        slots: vec![16],
        io: IoMethod::Pool,
        policy: PolicyKind::default(),
        patience: StoreOptions::PATIENCE,
    };
    let drive = Arc::new(Drive::default());
    let store = ExpertStore::over(drive, layers, &classes, &options).unwrap();
    let (mut picture, start) = (Picture::default(), Instant::now());
    for _ in 0..1000 {
        store.look(&mut picture);
        assert_eq!(picture.experts().len(), 58 * MANY);
    }
    // It takes less than a second. One step for each pair of experts would take minutes.
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}
