//! What an onlooker sees of the store: where each expert is, and whether it was asked for lately.

use super::{ExpertStore, Residence};

/// Where an expert is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// On the drive alone.
    #[default]
    Absent,
    /// On its way into memory.
    Arriving,
    /// In memory.
    Resident,
    /// In the memory of the device that computes.
    Device,
}

/// How an expert was asked for since the last picture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Asked {
    /// By nobody.
    #[default]
    Not,
    /// It was in memory.
    Hit,
    /// It had to be waited for.
    Missed,
    /// Several times, and it was not the same each time.
    Both,
}

/// What is seen of one expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sight {
    /// Where it is.
    pub place: Residency,
    /// Whether it was asked for.
    pub asked: Asked,
}

/// A picture of the store. Taken again and again, it tells what happened in between; several onlookers each have
/// their own.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    experts: Vec<Sight>,
    /// When it was last taken, counted in pictures of anybody's.
    taken: Option<u32>,
}

impl Picture {
    /// The experts of all layers, one layer after the other.
    pub fn experts(&self) -> &[Sight] {
        &self.experts
    }
}

impl ExpertStore {
    /// Takes a picture anew. The first time nothing counts as asked for.
    ///
    /// The store's lock is held for one layer at a time, so that those who compute hardly wait; experts that are asked
    /// for meanwhile may be seen in this picture and the next.
    pub fn look(&self, picture: &mut Picture) {
        let since = {
            let mut state = self.shared.lock();
            state.pictures += 1;
            picture.taken.replace(state.pictures).unwrap_or(state.pictures)
        };
        picture.experts.resize(self.experts(), Sight::default());
        for layer in 0..self.shared.layers.len() {
            let experts = self.shared.numbering.layer(layer);
            if experts.is_empty() {
                continue;
            }
            let state = self.shared.lock();
            for expert in experts {
                let place = match state.experts[expert] {
                    _ if state.on_device(expert).is_some() => Residency::Device,
                    Residence::Drive => Residency::Absent,
                    Residence::Reading { .. } => Residency::Arriving,
                    Residence::Memory { .. } => Residency::Resident,
                };
                picture.experts[expert] = Sight { place, asked: state.asked[expert].since(since) };
            }
        }
    }
}

/// When an expert was last found in memory, and when it was last missed: after how many pictures. Zero, because nobody
/// was looking, is as good as never.
#[derive(Clone, Copy, Default)]
pub(super) struct LastAsked {
    hit: u32,
    missed: u32,
}

impl LastAsked {
    /// It is asked for, after so many pictures.
    pub fn note(&mut self, pictures: u32, hit: bool) {
        *(if hit { &mut self.hit } else { &mut self.missed }) = pictures;
    }

    /// How it was asked for since a picture, which is not the zeroth.
    fn since(self, picture: u32) -> Asked {
        match (self.hit >= picture, self.missed >= picture) {
            (false, false) => Asked::Not,
            (true, false) => Asked::Hit,
            (false, true) => Asked::Missed,
            (true, true) => Asked::Both,
        }
    }
}
