//! Experts in slots of the GPU's memory, and on their way there.
//!
//! They come as they lie in the computer's slots: the copies are a line of their own, beside the computing, into a ring of places on the
//! GPU. From there a kernel, in the line of computing, puts them in order in their slots. So whoever had a slot before has been
//! computed with when the next one is put there, and a place of the ring is free when that kernel has run.

use std::collections::VecDeque;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use forebay_engine::store::{DeviceSlot, ExpertLayer, Leases, SlotClasses};
use forebay_engine::{Bytes, Error, Result};

use crate::driver::{Address, Gpu, Line, Memory, Moment, Pinned};
use crate::weights::{LayerExperts, PlaneSource};

/// A part of a slot that a kernel puts in order, as it reads it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Plane {
    from: Address,
    to: Address,
    row_step: u64,
    rows: u32,
    units: u32,
    unit: u32,
    unit_step: u32,
}

/// An expert and the slot it came to, as a kernel reads it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Arrival {
    index: u64,
    slot: Address,
}

/// The slots of a class, and bytes of each.
type Arena = (Memory, usize);

/// The slots of all classes, and what they hold.
pub struct ExpertSlots {
    /// By class.
    arenas: Vec<Arena>,
    /// By layer.
    pub layers: Vec<Option<LayerExperts>>,
    /// By layer: where its experts start in the table.
    starts: Vec<usize>,
    /// Where all experts are, as far as they are; where one was that has left, nobody looks.
    table: Memory,
    ring: Ring,
    /// What is to be put in order of what was brought last.
    planes: Vec<Plane>,
    arrivals: Vec<Arrival>,
}

/// The places through which experts come, taken in turn.
struct Ring {
    gpu: Arc<Gpu>,
    places: usize,
    bytes: usize,
    memory: Memory,
    /// For experts that are where the GPU cannot copy from.
    bounce: Option<Pinned>,
    next: usize,
    /// By place: when what was brought together with it, up to there, had come, and when it was put in order.
    come: Vec<Moment>,
    arranged: Vec<Moment>,
    /// By place: up to which place its last content was brought.
    until: Vec<usize>,
    /// What is on its way, the oldest first: how many, up to which place, and what keeps them where they come from.
    on_the_way: VecDeque<(usize, Leases)>,
}

impl ExpertSlots {
    /// So many slots of each class, or as many as there is memory for, but not less than the least.
    ///
    /// # Errors
    /// If a type is not supported, or the least do not fit.
    pub fn new(
        gpu: &Arc<Gpu>,
        layers: &[Option<ExpertLayer>],
        classes: &SlotClasses,
        slots: &[usize],
    ) -> Result<(ExpertSlots, Vec<usize>)> {
        let of = |layer: &Option<ExpertLayer>| layer.as_ref().map(LayerExperts::new).transpose();
        let layers: Vec<Option<LayerExperts>> = layers.iter().map(of).collect::<Result<_>>()?;
        for (layer, class) in layers.iter().zip(&classes.of_layer) {
            if let (Some(layer), Some(class)) = (layer, class) {
                assert!(layer.slot_bytes <= classes.classes[*class].device_bytes, "slots were planned");
            }
        }
        let mut starts = vec![0];
        for layer in &layers {
            starts.push(starts[starts.len() - 1] + layer.as_ref().map_or(0, |layer| layer.count));
        }
        let table = gpu.allocate(starts[starts.len() - 1] * 8, "the table of experts")?;
        let ring = Ring::new(gpu, classes.staging())?;
        let (arenas, slots) = arenas(gpu, classes, slots)?;
        let (planes, arrivals) = (Vec::new(), Vec::new());
        Ok((ExpertSlots { arenas, layers, starts, table, ring, planes, arrivals }, slots))
    }

    /// Where a layer's part of the table is.
    pub fn table(&self, layer: usize) -> Address {
        self.table.address() + (self.starts[layer] * 8) as u64
    }

    /// Where the whole table is.
    pub fn whole_table(&self) -> Address {
        self.table.address()
    }

    /// Where a slot is.
    pub fn address(&self, place: DeviceSlot) -> Address {
        let (memory, bytes) = &self.arenas[place.class];
        assert!((place.slot + 1) * bytes <= memory.bytes());
        memory.address() + (place.slot * bytes) as u64
    }

    /// How many experts are best brought together: while some are put in order, others come.
    pub fn together(&self) -> usize {
        self.ring.places / 2
    }

    /// Starts copies of experts, and lets the line of computing wait for them. Says what is to be put in order there.
    ///
    /// # Errors
    /// If the GPU refuses.
    pub fn bring(&mut self, leases: Leases) -> Result<(&[Plane], &[Arrival])> {
        match self.start_copies(&leases).and_then(|()| self.ring.sent(leases.len())) {
            Ok(()) => {
                self.ring.on_the_way.push_back((self.ring.last(), leases));
                Ok((&self.planes, &self.arrivals))
            }
            Err(error) => {
                // What was started needs its leases until it has ended.
                let _ = self.ring.gpu.wait_for(Line::Copies);
                Err(error)
            }
        }
    }

    fn start_copies(&mut self, leases: &Leases) -> Result<()> {
        self.planes.clear();
        self.arrivals.clear();
        self.ring.make_room(leases.len())?;
        for lease in leases {
            let (raw, starts) = lease.raw();
            let from = self.ring.copy(raw)?;
            let slot = self.address(lease.place().expect("it has been given a slot"));
            let layer = lease.layer().0;
            let experts = self.layers[layer].as_ref().expect("it has experts");
            for &PlaneSource { range, gather, rows, to } in &experts.planes {
                self.planes.push(Plane {
                    from: from + (starts[range] + gather.start) as u64,
                    to: slot + to,
                    row_step: gather.row_step as u64,
                    rows: rows as u32,
                    units: gather.units as u32,
                    unit: gather.unit as u32,
                    unit_step: gather.unit_step as u32,
                });
            }
            self.arrivals
                .push(Arrival { index: (self.starts[layer] + lease.expert().0 as usize) as u64, slot });
        }
        Ok(())
    }

    /// What was brought last has been put in order when what was started so far has ended.
    ///
    /// # Errors
    /// If the GPU refuses.
    pub fn arranged(&self) -> Result<()> {
        self.ring.arranged[self.ring.last()].set(Line::Compute)
    }

    /// Drops leases of experts that have come; if none has, and it is told to, it waits for one. Says whether it dropped any.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn let_go(&mut self, wait: bool) -> Result<bool> {
        let before = self.ring.on_the_way.len();
        while let Some((last, _)) = self.ring.on_the_way.front() {
            let come = &self.ring.come[*last];
            if !come.has_passed() {
                if !wait || self.ring.on_the_way.len() < before {
                    break;
                }
                come.wait()?;
            }
            self.ring.on_the_way.pop_front();
        }
        Ok(self.ring.on_the_way.len() < before)
    }
}

impl Ring {
    fn new(gpu: &Arc<Gpu>, (places, bytes): (usize, usize)) -> Result<Ring> {
        let moments = || (0..places).map(|_| Moment::new(gpu)).collect::<Result<Vec<_>>>();
        Ok(Ring {
            gpu: gpu.clone(),
            places,
            bytes,
            memory: gpu.allocate(places * bytes, "experts on their way")?,
            bounce: None,
            next: 0,
            come: moments()?,
            arranged: moments()?,
            until: (0..places).collect(),
            on_the_way: VecDeque::with_capacity(places),
        })
    }

    /// The place that was taken last.
    fn last(&self) -> usize {
        (self.next + self.places - 1) % self.places
    }

    /// Waits until so many places are free to be copied to, as far as what is kept for the last copies goes.
    fn make_room(&mut self, count: usize) -> Result<()> {
        assert!(count <= self.places);
        let taken = |ring: &Ring| ring.on_the_way.iter().map(|(_, leases)| leases.len()).sum::<usize>();
        while taken(self) + count > self.places {
            let (last, leases) = self.on_the_way.pop_front().expect("places are taken by what is on its way");
            self.come[last].wait()?;
            drop(leases);
        }
        Ok(())
    }

    /// Starts the copy of an expert to the next place.
    fn copy(&mut self, raw: &[u8]) -> Result<Address> {
        assert!(raw.len() <= self.bytes);
        let place = self.next;
        self.arranged[self.until[place]].hold_up(Line::Copies)?;
        let to = self.memory.address() + (place * self.bytes) as u64;
        if self.gpu.is_pinned(raw) {
            // SAFETY: the lease keeps the bytes until the copy has ended, and the place is the ring's.
            unsafe { self.gpu.bring(to, raw) }?;
        } else {
            let bounce = match &mut self.bounce {
                Some(bounce) => bounce,
                none => none.insert(Pinned::new(&self.gpu, self.places * self.bytes)?),
            };
            let here = &mut bounce.bytes()[place * self.bytes..][..raw.len()];
            here.copy_from_slice(raw);
            // SAFETY: the bytes are written to again when the copy has ended, which `make_room` waits for.
            unsafe { self.gpu.bring(to, here) }?;
        }
        self.next = (place + 1) % self.places;
        Ok(to)
    }

    /// The last so many copies belong together.
    fn sent(&mut self, count: usize) -> Result<()> {
        let last = self.last();
        for i in 0..count {
            self.until[(last + self.places - i) % self.places] = last;
        }
        self.come[last].set(Line::Copies)?;
        self.come[last].hold_up(Line::Compute)
    }
}

/// Memory for slots; where the GPU has less than was planned, because others use it, fewer of them.
fn arenas(gpu: &Arc<Gpu>, classes: &SlotClasses, slots: &[usize]) -> Result<(Vec<Arena>, Vec<usize>)> {
    let mut slots = slots.to_vec();
    loop {
        let make = |(class, &count): (usize, &usize)| {
            let bytes = classes.classes[class].device_bytes;
            Ok((gpu.allocate(bytes * count, "experts")?, bytes))
        };
        match slots.iter().enumerate().map(make).collect::<Result<Vec<_>>>() {
            Ok(arenas) => return Ok((arenas, slots)),
            Err(error) => {
                let wanted = classes.device_bytes(&slots);
                let fewer =
                    classes.divide_device(wanted / 8 * 7).filter(|_| !matches!(error, Error::Budget { .. }));
                let Some(fewer) = fewer.filter(|fewer| *fewer != slots) else { return Err(error) };
                let (wanted, fewer_bytes) = (Bytes(wanted), Bytes(classes.device_bytes(&fewer)));
                tracing::warn!(
                    "{wanted} of the GPU's memory are not free for experts, trying {fewer_bytes}: {error}"
                );
                slots = fewer;
            }
        }
    }
}
