//! What a call tells of itself at debug level DETAIL: the shapes of its tensors, and where it was made.
//!
//! Both are words, made when the call is, so that nothing has to be looked up when something goes wrong: a conclusion waits for
//! no symbols. They travel with what a rank says in a comparison, and are shown, bounded and in one line, but never relied on.
//!
//! Which shapes must be the same on all ranks is decided here, too: where c10d's wrapper compares them, and for lists that
//! travel as one tensor, where another cut would mix up their elements. They are compared by hash, in the label.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tenfold_plan::Rank;

use crate::label::OpKind;
use crate::recorder::{CallSite, Frame, Site, Sizes};

/// Frames that are shown of a call site.
const FRAMES_MAX: usize = 3;

/// Shapes that are shown of a list.
const SHAPES_MAX: usize = 4;

/// Bytes of a text that is shown.
const TEXT_MAX: usize = 240;

/// A call in words.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Detail {
    /// As in `input 10×100, output 40×100`.
    shapes: String,
    /// As in `train.py:42 in step ← train.py:90 in main`.
    at: String,
}

/// Tensors of one side of a call.
type Shapes = Vec<Vec<u64>>;

impl Detail {
    /// A call that is being made. If no shapes were given, they are flat, as this crate's tensors are.
    pub(in crate::group) fn new(site: &Site, input: Sizes, output: Sizes) -> Self {
        let CallSite { frames, input_shapes, output_shapes } = site.get();
        let flat = |sizes: Sizes| sizes.lengths().into_iter().map(|length| vec![length]).collect();
        let inputs: Shapes = input_shapes.clone().unwrap_or_else(|| flat(input));
        let outputs: Shapes = output_shapes.clone().unwrap_or_else(|| flat(output));
        let frames: Vec<String> = frames.iter().take(FRAMES_MAX).map(show_frame).collect();
        let mut shapes = side("input", &inputs);
        if outputs != inputs {
            let outputs = side("output", &outputs);
            shapes += if shapes.is_empty() || outputs.is_empty() { "" } else { ", " };
            shapes += &outputs;
        }
        Detail { shapes: one_line(&shapes), at: one_line(&frames.join(" ← ")) }
    }

    /// What another rank said: as long as ours, and on one line.
    pub(in crate::group) fn heard(self) -> Self {
        Detail { shapes: one_line(&self.shapes), at: one_line(&self.at) }
    }
}

/// As in `with input 10×100 at train.py:42 in step`.
impl std::fmt::Display for Detail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.shapes[..], &self.at[..]) {
            ("", at) => write!(f, "at {at}"),
            (shapes, "") => write!(f, "with {shapes}"),
            (shapes, at) => write!(f, "with {shapes} at {at}"),
        }
    }
}

/// What ranks tell of the same call, as in ` [input 10×100, at train.py:42 in step and 2 other places]`.
pub(in crate::group) fn show_all<'a>(said: impl Iterator<Item = (Rank, &'a Detail)>) -> String {
    let mut shapes: Vec<(&str, Vec<Rank>)> = Vec::new();
    let mut places: Vec<&str> = Vec::new();
    for (rank, detail) in said {
        match shapes.iter_mut().find(|(shapes, _)| *shapes == detail.shapes) {
            Some((_, ranks)) => ranks.push(rank),
            None => shapes.push((&detail.shapes, vec![rank])),
        }
        if !detail.at.is_empty() && !places.contains(&&detail.at[..]) {
            places.push(&detail.at);
        }
    }
    let mut texts: Vec<String> = Vec::new();
    match shapes.as_slice() {
        [] => return String::new(),
        [("", _)] => {}
        [(one, _)] => texts.push(one.to_string()),
        // Only the root has all tensors, or lengths differ where they may.
        [(first, ranks), others @ ..] => {
            let first = if first.is_empty() { "no tensors" } else { first };
            let (rank, count) = (ranks[0], others.iter().map(|(_, ranks)| ranks.len()).sum::<usize>());
            let other = if count == 1 { "1 other rank" } else { &format!("{count} other ranks") };
            texts.push(format!("{first} on rank {rank}, other shapes on {other}"));
        }
    }
    match places.as_slice() {
        [] => {}
        [one] => texts.push(format!("at {one}")),
        [first, _] => texts.push(format!("at {first} and 1 other place")),
        [first, others @ ..] => texts.push(format!("at {first} and {} other places", others.len())),
    }
    if texts.is_empty() { String::new() } else { format!(" [{}]", texts.join(", ")) }
}

/// A hash of the shapes that all ranks must have; `None` if they may differ or were not given.
pub(in crate::group) fn hash_of_shapes(kind: OpKind, count: u64, site: &Site) -> Option<u64> {
    let CallSite { input_shapes, output_shapes, .. } = site.get();
    let (inputs, outputs) = (input_shapes.as_ref()?, output_shapes.as_ref()?);
    let alike = |list: &Shapes| list.windows(2).all(|pair| elements(&pair[0]) == elements(&pair[1]));
    let none = &Shapes::new();
    let (inputs, outputs) = match kind {
        OpKind::Broadcast | OpKind::AllReduce | OpKind::AllReduceCoalesced | OpKind::Reduce => (inputs, none),
        OpKind::Gather | OpKind::Scan => (inputs, none),
        OpKind::Scatter => (none, outputs),
        OpKind::AllGatherInto | OpKind::ReduceScatterInto => (inputs, outputs),
        OpKind::AllGather | OpKind::AllGatherCoalesced if alike(outputs) => (inputs, none),
        OpKind::ReduceScatter if alike(inputs) => (none, outputs),
        OpKind::AllToAllSingle if count > 0 => (inputs, outputs), // with splits it is 0
        OpKind::AllToAll if alike(inputs) && alike(outputs) => (inputs, outputs),
        _ => return None,
    };
    // FNV-1a over whole numbers; fixed, since ranks may run different builds. Lengths keep lists apart.
    let numbers = [inputs, outputs].into_iter().flat_map(|side| {
        let shape = |shape: &Vec<u64>| std::iter::once(shape.len() as u64).chain(shape.clone());
        std::iter::once(side.len() as u64).chain(side.iter().flat_map(shape).collect::<Vec<_>>())
    });
    Some(numbers.fold(0xcbf2_9ce4_8422_2325, |hash: u64, number| {
        let hash = (hash ^ number).wrapping_mul(0x100_0000_01b3);
        hash ^ hash >> 29
    }))
}

fn elements(shape: &[u64]) -> u64 {
    shape.iter().fold(1, |product: u64, length| product.saturating_mul(*length))
}

/// As in `inputs 2×3, 4 and 5 more`.
fn side(name: &str, shapes: &Shapes) -> String {
    let shown: Vec<String> = shapes.iter().take(SHAPES_MAX).map(|shape| show_shape(shape)).collect();
    match shapes.len() {
        0 => String::new(),
        1 => format!("{name} {}", shown[0]),
        all if all > SHAPES_MAX => format!("{name}s {} and {} more", shown.join(", "), all - SHAPES_MAX),
        _ => format!("{name}s {}", shown.join(", ")),
    }
}

fn show_shape(shape: &[u64]) -> String {
    match shape {
        [] => "scalar".to_string(),
        lengths => lengths.iter().map(u64::to_string).collect::<Vec<_>>().join("×"),
    }
}

/// As in `train.py:42 in step`; the folder is named, too, where many files are called alike.
fn show_frame(frame: &Frame) -> String {
    const COMMON: [&str; 5] = ["__init__.py", "__main__.py", "mod.rs", "lib.rs", "main.rs"];
    let mut parts = frame.file.rsplit('/');
    let mut file = parts.next().unwrap_or_default().to_string();
    if let Some(folder) = parts.next().filter(|_| COMMON.contains(&&file[..])) {
        file = format!("{folder}/{file}");
    }
    // Of a generic function only the name; Python's `<module>` is one.
    let name = match frame.name.find('<') {
        Some(start) if start > 0 => &frame.name[..start],
        _ => &frame.name,
    };
    match &file[..] {
        "" => name.to_string(),
        file => format!("{file}:{} in {name}", frame.line),
    }
}

/// Cut at a bound, without what would break a line.
fn one_line(text: &str) -> String {
    let plain = |letter: char| if letter.is_control() { ' ' } else { letter };
    let mut shown: String = text
        .chars()
        .map(plain)
        .scan(0, |bytes, letter| {
            *bytes += letter.len_utf8();
            (*bytes <= TEXT_MAX).then_some(letter)
        })
        .collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

/// Keeps what the last calls told of themselves.
#[derive(Debug, Default)]
pub(in crate::group) struct Details {
    calls: std::collections::VecDeque<(u64, Arc<Detail>)>,
}

impl Details {
    pub(in crate::group) fn keep(&mut self, seq: u64, detail: Arc<Detail>, calls_max: usize) {
        if self.calls.len() >= calls_max {
            self.calls.pop_front();
        }
        self.calls.push_back((seq, detail));
    }

    pub(in crate::group) fn of(&self, seq: u64) -> Option<&Detail> {
        self.calls.iter().find(|(number, _)| *number == seq).map(|(_, detail)| &**detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(inputs: &[&[u64]], outputs: &[&[u64]], frames: &[(&str, &str, u32)]) -> Site {
        let shapes = |list: &[&[u64]]| Some(list.iter().map(|shape| shape.to_vec()).collect());
        let frame = |(name, file, line): &(&str, &str, u32)| Frame {
            name: name.to_string(),
            file: file.to_string(),
            line: *line,
        };
        Site::Given(CallSite {
            frames: frames.iter().map(frame).collect(),
            input_shapes: shapes(inputs),
            output_shapes: shapes(outputs),
        })
    }

    fn shown(site: &Site) -> String {
        Detail::new(site, Sizes::NONE, Sizes::NONE).to_string()
    }

    #[test]
    fn a_call_says_its_shapes_and_where_it_is() {
        let step = ("step", "/home/me/train.py", 42);
        let frames =
            [step, ("main<T>", "/home/me/job/__main__.py", 9), ("<module>", "a.py", 1), ("x", "b.py", 2)];
        let place = "train.py:42 in step ← job/__main__.py:9 in main ← a.py:1 in <module>";
        assert_eq!(
            shown(&site(&[&[10, 100]], &[&[10, 100]], &frames)),
            format!("with input 10×100 at {place}")
        );
        let gather = site(&[&[2, 3]], &[&[2, 3], &[2, 3]], &[step]);
        assert_eq!(shown(&gather), "with input 2×3, outputs 2×3, 2×3 at train.py:42 in step");
        assert_eq!(shown(&site(&[&[]], &[], &[])), "with input scalar");
        let one: &[u64] = &[1];
        assert_eq!(shown(&site(&[one; 9], &[], &[])), "with inputs 1, 1, 1, 1 and 5 more");
        assert_eq!(shown(&site(&[], &[], &[("main", "", 0)])), "at main");
        let flat = Site::Given(CallSite::default());
        let flat = Detail::new(&flat, Sizes::one(4), Sizes::of([4, 4].into_iter()));
        assert_eq!(flat.to_string(), "with input 4, outputs 4, 4");
    }

    #[test]
    fn a_text_is_cut_and_stays_on_its_line() {
        let said = Detail { shapes: "a\nb\u{1b}[31m".to_string(), at: "×".repeat(4 * TEXT_MAX) };
        let Detail { shapes, at } = said.heard();
        assert_eq!(shapes, "a b [31m");
        assert_eq!(at, "×".repeat(TEXT_MAX / 2) + "…");
    }

    #[test]
    fn what_ranks_tell_of_one_call_is_told_once() {
        let detail = |shapes: &str, at: &str| Detail { shapes: shapes.into(), at: at.into() };
        let (a, b, c) = (detail("input 4", "a:1"), detail("input 4", "b:2"), detail("input 4", "c:3"));
        let root = detail("input 4, outputs 4, 4", "a:1");
        let all = |said: &[&Detail]| show_all(said.iter().enumerate().map(|(rank, detail)| (rank, *detail)));
        assert_eq!(all(&[]), "");
        assert_eq!(all(&[&detail("", "")]), "");
        assert_eq!(all(&[&a, &a, &a]), " [input 4, at a:1]");
        assert_eq!(all(&[&a, &b, &a]), " [input 4, at a:1 and 1 other place]");
        assert_eq!(all(&[&a, &b, &c, &c]), " [input 4, at a:1 and 2 other places]");
        assert_eq!(
            all(&[&root, &a]),
            " [input 4, outputs 4, 4 on rank 0, other shapes on 1 other rank, at a:1]"
        );
    }

    #[test]
    fn shapes_are_compared_where_ranks_must_agree() {
        let hash = |kind, inputs: &[&[u64]], outputs: &[&[u64]]| {
            hash_of_shapes(kind, 6, &site(inputs, outputs, &[]))
        };
        let (wide, tall, flat): (&[u64], &[u64], &[u64]) = (&[2, 3], &[3, 2], &[6]);
        for kind in [OpKind::AllReduce, OpKind::Broadcast, OpKind::Reduce, OpKind::Scan] {
            let of = |shape| hash(kind, &[shape], &[shape]);
            assert!(of(wide).is_some());
            assert_ne!(of(wide), of(tall));
            assert_ne!(of(wide), of(flat));
        }
        // Only the root of a gather has outputs.
        assert_eq!(hash(OpKind::Gather, &[wide], &[wide, wide]), hash(OpKind::Gather, &[wide], &[]));
        assert_eq!(hash(OpKind::Scatter, &[wide, wide], &[wide]), hash(OpKind::Scatter, &[], &[wide]));
        // Uneven lists may have another shape on each rank.
        assert_eq!(hash(OpKind::AllGather, &[wide], &[wide, &[5]]), None);
        assert!(hash(OpKind::AllGather, &[wide], &[wide, tall]).is_some());
        // As one tensor they would be mixed up.
        let lists = [[&[2][..], &[3]], [&[3], &[2]]];
        let [one, other] = lists.map(|list| hash(OpKind::AllReduceCoalesced, &list, &list));
        assert_ne!(one, other);
        assert_eq!(hash_of_shapes(OpKind::AllToAllSingle, 0, &site(&[wide], &[wide], &[])), None);
        assert_eq!(hash_of_shapes(OpKind::AllReduce, 6, &Site::Given(CallSite::default())), None);
        assert_eq!(hash(OpKind::Barrier, &[], &[]), None);
    }
}
