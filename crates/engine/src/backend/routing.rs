//! The router's choices for a batch, sorted by expert.

use forebay_kernels::Kernels;
use forebay_kernels::math::{exp, sigmoid};
use smallvec::SmallVec;

use super::{Backend, Buf, Matrix, Vector};
use crate::ExpertIdx;
use crate::error::Result;

/// The settings of a router: how a layer chooses experts from its router's logits.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// The number of experts.
    pub experts: usize,
    /// Experts chosen for each token.
    pub top_k: usize,
    /// How logits become scores.
    pub scores: Scores,
    /// Groups of experts to choose first; `None` to choose from all experts.
    pub groups: Option<Groups>,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalise: bool,
    /// Added to that sum.
    pub epsilon: f32,
    /// A factor of the final weights.
    pub scale: f32,
}

/// How scores are computed from logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scores {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// The logits. The weight of a chosen expert is its softmax among the experts that are about as good and were not
    /// chosen before it.
    SparseMixer {
        /// How far a logit may be below that of the chosen expert, relative to the larger of its size and the chosen
        /// expert's logit.
        tolerance: f32,
    },
}

/// Experts in groups of equal size: the router chooses groups for a token, then experts in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// The number of groups.
    pub count: usize,
    /// The number of groups that a token uses.
    pub used: usize,
    /// How a group is scored.
    pub score: GroupScore,
}

/// How a group's score is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The score of its best expert.
    Best,
    /// The sum of the scores of its two best experts.
    BestTwo,
}

impl Groups {
    /// Excludes the experts of all but the best groups; of equal groups, the lower index wins.
    fn mask(&self, kernels: &Kernels, scores: &mut [f32]) {
        let size = scores.len() / self.count;
        let value: SmallVec<[f32; 32]> = scores.chunks_exact(size).map(|group| self.value(group)).collect();
        let mut chosen: SmallVec<[u32; 32]> = SmallVec::from_elem(0, self.used);
        (kernels.top_k)(&value, &mut chosen);
        for (i, group) in scores.chunks_exact_mut(size).enumerate() {
            if !chosen.contains(&(i as u32)) {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }

    fn value(&self, scores: &[f32]) -> f32 {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &score in scores {
            if score > best {
                (best, second) = (score, best);
            } else if score > second {
                second = score;
            }
        }
        match self.score {
            GroupScore::BestTwo if scores.len() > 1 => best + second,
            GroupScore::BestTwo | GroupScore::Best => best,
        }
    }
}

impl Router {
    /// Chooses for one token: the `top_k` highest scores; of equal scores, the lower index wins. Replaces the logits
    /// by the scores, and by minus infinity for groups that are not chosen.
    pub fn choose(&self, kernels: &Kernels, logits: &mut [f32], experts: &mut [u32], weights: &mut [f32]) {
        self.score(kernels, logits);
        self.choose_groups(kernels, logits);
        (kernels.top_k)(logits, experts);
        self.weigh(logits, experts, weights);
    }

    /// Chooses for one token by score plus correction; the weights ignore the correction. Overwrites `corrected` with
    /// the sums and the logits with the scores.
    pub fn choose_corrected(
        &self,
        kernels: &Kernels,
        logits: &mut [f32],
        corrected: &mut [f32],
        experts: &mut [u32],
        weights: &mut [f32],
    ) {
        self.score(kernels, logits);
        (kernels.add)(corrected, logits);
        self.choose_groups(kernels, corrected);
        (kernels.top_k)(corrected, experts);
        self.weigh(logits, experts, weights);
    }

    fn choose_groups(&self, kernels: &Kernels, scores: &mut [f32]) {
        if let Some(groups) = &self.groups {
            groups.mask(kernels, scores);
        }
    }

    fn score(&self, kernels: &Kernels, logits: &mut [f32]) {
        match self.scores {
            Scores::Softmax => (kernels.softmax)(logits),
            Scores::Sigmoid => logits.iter_mut().for_each(|logit| *logit = sigmoid(*logit)),
            Scores::SparseMixer { .. } => {}
        }
    }

    fn weigh(&self, scores: &[f32], experts: &[u32], weights: &mut [f32]) {
        for (rank, weight) in weights.iter_mut().enumerate() {
            *weight = match self.scores {
                Scores::Softmax | Scores::Sigmoid => scores[experts[rank] as usize],
                Scores::SparseMixer { tolerance } => mixed(scores, &experts[..=rank], tolerance),
            };
        }
        if self.normalise {
            let sum = weights.iter().sum::<f32>() + self.epsilon;
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        if self.scale != 1.0 {
            weights.iter_mut().for_each(|w| *w *= self.scale);
        }
    }
}

/// The softmax of the last chosen expert among those that are about as good and were not chosen before it.
fn mixed(logits: &[f32], chosen: &[u32], tolerance: f32) -> f32 {
    let Some((&last, before)) = chosen.split_last() else { return 0.0 };
    let best = logits[last as usize];
    let sum: f32 =
        (0..).zip(logits).filter(|(expert, _)| !before.contains(expert)).fold(0.0, |sum, (_, &logit)| {
            // Of two zeros, the distance is not a number, so the comparison must not be turned round.
            let is_worse = (best - logit) / logit.abs().max(best) > tolerance;
            if is_worse { sum } else { sum + exp(logit - best) }
        });
    1.0 / sum
}

/// The weights of one layer's router.
#[derive(Clone, Copy, Debug)]
pub struct RouterWeights {
    /// `[experts, hidden]`
    pub matrix: Matrix,
    /// `[experts]` Added to the logits.
    pub bias: Option<Vector>,
    /// `[experts]` Added to the scores for the choice, but not for the weights.
    pub correction: Option<Vector>,
    /// `[experts]` Factors of the final weights of experts.
    pub factors: Option<Vector>,
}

impl RouterWeights {
    /// `logits = W x + bias`
    ///
    /// # Errors
    /// If the backend fails.
    pub fn logits(&self, b: &mut dyn Backend, x: Buf, logits: Buf) -> Result<()> {
        b.matmul(x, &[(self.matrix, logits)])?;
        match self.bias {
            Some(bias) => b.add_bias(logits, bias),
            None => Ok(()),
        }
    }
}

/// The experts of every token of a batch.
///
/// A *pair* is a token and a rank among its choices, numbered `token · top_k + rank`. Experts compute buckets: all
/// pairs that chose them. Buckets are stored one after another, so that each expert reads and writes consecutive
/// rows.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    top_k: usize,
    /// `[tokens, top_k]`, the best first.
    experts: Vec<u32>,
    /// `[tokens, top_k]`
    weights: Vec<f32>,
    /// The distinct experts, ascending.
    chosen: Vec<ExpertIdx>,
    /// The start of each expert's bucket, and the end of the last.
    starts: Vec<u32>,
    /// `[tokens · top_k]` The token at each place, bucket after bucket.
    tokens: Vec<u32>,
    /// `[tokens, top_k]` The place of each pair.
    places: Vec<u32>,
}

impl Routing {
    /// Allocates for a batch and returns the choices to fill in: experts and weights, `[tokens, top_k]`.
    pub fn prepare(&mut self, tokens: usize, top_k: usize) -> (&mut [u32], &mut [f32]) {
        self.top_k = top_k;
        self.experts.resize(tokens * top_k, 0);
        self.weights.resize(tokens * top_k, 0.0);
        (&mut self.experts, &mut self.weights)
    }

    /// Sorts the choices into buckets, for a layer of `count` experts.
    pub fn sort(&mut self, count: usize) {
        self.starts.clear();
        self.starts.resize(count + 1, 0);
        for &expert in &self.experts {
            self.starts[expert as usize + 1] += 1;
        }
        self.chosen.clear();
        for expert in 0..count {
            if self.starts[expert + 1] > 0 {
                self.chosen.push(ExpertIdx(expert as u32));
            }
            self.starts[expert + 1] += self.starts[expert];
        }
        self.tokens.resize(self.experts.len(), 0);
        self.places.resize(self.experts.len(), 0);
        // While the buckets are filled, a bucket's start counts its pairs; in the end it is the start of the next
        // bucket.
        for (pair, &expert) in self.experts.iter().enumerate() {
            let place = &mut self.starts[expert as usize];
            self.tokens[*place as usize] = (pair / self.top_k) as u32;
            self.places[pair] = *place;
            *place += 1;
        }
        self.starts.rotate_right(1);
        self.starts[0] = 0;
    }

    /// The number of experts chosen for each token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// The experts of every token, `[tokens, top_k]`, the best first.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// The first half of each token's choices, the best first, for prefetching. Predictions of these choices are
    /// nearly always right; those of the others only about half of the time.
    pub fn likeliest(&self) -> impl Iterator<Item = ExpertIdx> {
        let firsts = self.top_k.div_ceil(2);
        let rows = self.experts.chunks_exact(self.top_k);
        rows.flat_map(move |row| &row[..firsts]).map(|&expert| ExpertIdx(expert))
    }

    /// The distinct experts, ascending.
    pub fn chosen(&self) -> &[ExpertIdx] {
        &self.chosen
    }

    /// The places of an expert's bucket.
    pub fn bucket(&self, expert: ExpertIdx) -> std::ops::Range<usize> {
        let expert = expert.0 as usize;
        self.starts[expert] as usize..self.starts[expert + 1] as usize
    }

    /// The pairs that chose an expert, and the place of each.
    pub fn pairs(&self, expert: ExpertIdx) -> impl Iterator<Item = (usize, usize)> {
        let all = self.experts.iter().zip(&self.places).enumerate();
        all.filter(move |(_, (chosen, _))| **chosen == expert.0)
            .map(|(pair, (_, place))| (pair, *place as usize))
    }

    /// The tokens at these places.
    pub fn tokens(&self, places: std::ops::Range<usize>) -> &[u32] {
        &self.tokens[places]
    }

    /// The choices of one token in rank order: place and weight.
    pub fn ranks(&self, token: usize) -> impl Iterator<Item = (usize, f32)> {
        let pairs = token * self.top_k..(token + 1) * self.top_k;
        self.places[pairs.clone()].iter().map(|&p| p as usize).zip(self.weights[pairs].iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_kernels::Isa;

    const ROUTER: Router = Router {
        experts: 4,
        top_k: 2,
        scores: Scores::Softmax,
        groups: None,
        normalise: false,
        epsilon: 0.0,
        scale: 1.0,
    };

    #[test]
    fn experts_come_from_the_best_groups() {
        let kernels = Kernels::for_isa(Isa::Scalar);
        // The first of two groups of three has the best expert, the second has the best two.
        let logits = [5.0, 0.0, 0.0, 4.8, 4.8, 4.9f32];
        let choose = |score: GroupScore| {
            let groups = Some(Groups { count: 2, used: 1, score });
            let router = Router { experts: 6, groups, ..ROUTER };
            let (mut experts, mut weights) = ([0; 2], [0.0; 2]);
            router.choose(kernels, &mut logits.clone(), &mut experts, &mut weights);
            let mut corrected = [0.0; 6];
            let mut again = [0; 2];
            router.choose_corrected(kernels, &mut logits.clone(), &mut corrected, &mut again, &mut weights);
            assert_eq!(experts, again);
            experts
        };
        assert_eq!(choose(GroupScore::Best), [0, 1]);
        assert_eq!(choose(GroupScore::BestTwo), [5, 3]);
    }

    #[test]
    fn buckets_hold_every_pair_once() {
        let mut routing = Routing::default();
        let (experts, weights) = routing.prepare(3, 2);
        experts.copy_from_slice(&[4, 1, 1, 0, 4, 1]);
        weights.copy_from_slice(&[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]);
        routing.sort(6);
        assert_eq!(routing.chosen(), [ExpertIdx(0), ExpertIdx(1), ExpertIdx(4)]);
        assert_eq!(routing.bucket(ExpertIdx(0)), 0..1);
        assert_eq!(routing.bucket(ExpertIdx(1)), 1..4);
        assert_eq!(routing.bucket(ExpertIdx(2)), 4..4);
        assert_eq!(routing.bucket(ExpertIdx(4)), 4..6);
        assert_eq!(routing.tokens(0..6), [1, 0, 1, 2, 0, 2]);
        assert_eq!(routing.ranks(0).collect::<Vec<_>>(), [(4, 0.1), (1, 0.2)]);
        assert_eq!(routing.ranks(2).collect::<Vec<_>>(), [(5, 0.5), (3, 0.6)]);
    }

    #[test]
    fn the_router_normalises_only_if_configured() {
        let kernels = Kernels::for_isa(Isa::Scalar);
        let mut router = ROUTER;
        let logits = [2.0f32.ln(), 0.0, 3.0f32.ln(), 0.0];
        let (mut experts, mut weights) = ([0; 2], [0.0; 2]);
        router.choose(kernels, &mut logits.clone(), &mut experts, &mut weights);
        assert_eq!(experts, [2, 0]);
        assert!((weights[0] - 3.0 / 7.0).abs() < 1e-6 && (weights[1] - 2.0 / 7.0).abs() < 1e-6);
        router.normalise = true;
        router.choose(kernels, &mut logits.clone(), &mut experts, &mut weights);
        assert!((weights[0] - 0.6).abs() < 1e-6 && (weights[1] - 0.4).abs() < 1e-6);
    }

    #[test]
    fn a_sparse_mixer_weighs_an_expert_against_those_about_as_good() {
        let kernels = Kernels::for_isa(Isa::Scalar);
        let router = Router { scores: Scores::SparseMixer { tolerance: 0.02 }, ..ROUTER };
        let choose = |logits: [f32; 4]| {
            let (mut experts, mut weights) = ([0; 2], [0.0; 2]);
            router.choose(kernels, &mut logits.clone(), &mut experts, &mut weights);
            (experts, weights)
        };
        // The second is within two per cent of the first, the third within two per cent of the second.
        let (experts, weights) = choose([1.0, 10.0, 9.85, 9.7]);
        assert_eq!(experts, [1, 2]);
        let share = 1.0 / (1.0 + (-0.15f32).exp());
        assert!(weights.iter().all(|weight| (weight - share).abs() < 1e-6), "{weights:?}");
        // None is close, and negative logits are compared by their size.
        assert_eq!(choose([-3.0, -1.0, -2.0, -9.0]), ([1, 2], [1.0; 2]));
        assert_eq!(choose([0.0, 0.0, -1.0, -2.0]), ([0, 1], [0.5, 1.0]));
    }

    #[test]
    fn a_correction_counts_in_the_choice_and_not_in_the_weights() {
        let kernels = Kernels::for_isa(Isa::Scalar);
        let router = Router { scores: Scores::Sigmoid, normalise: true, scale: 2.0, ..ROUTER };
        // Scores of 3/4, 1/2, 1/4 and 1/2.
        let mut logits = [3.0f32.ln(), 0.0, -(3.0f32.ln()), 0.0];
        let (mut experts, mut weights) = ([0; 2], [0.0; 2]);
        let mut corrected = [0.0, 0.0, 0.9, -0.4];
        router.choose_corrected(kernels, &mut logits, &mut corrected, &mut experts, &mut weights);
        assert_eq!(experts, [2, 0]);
        assert!((weights[0] - 0.5).abs() < 1e-6 && (weights[1] - 1.5).abs() < 1e-6, "{weights:?}");
    }
}
