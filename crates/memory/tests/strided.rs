//! Tensors whose elements do not lie one after the other are packed and unpacked in order.

use std::ptr::NonNull;

use tenfold_memory::{BufferView, Bytes, DType, Span};

/// A view of `values` with this shape and these steps, from element `first` on.
fn view(values: &mut [i32], first: usize, shape: &[usize], steps: &[isize]) -> BufferView {
    let start = NonNull::from(&mut values[first..]).cast();
    // SAFETY: every test reaches only elements of `values`, which it does not touch while the view exists.
    unsafe { BufferView::from_strided(start, shape, steps, DType::I32, ()) }
}

fn packed(view: &BufferView) -> Vec<i32> {
    let mut bytes = vec![0; view.byte_len()];
    view.pack(Span::of(&mut bytes));
    bytes.as_chunks().0.iter().map(|bytes| i32::from_ne_bytes(*bytes)).collect()
}

#[test]
fn a_transposed_matrix_is_packed_by_rows_and_unpacked_to_where_it_was() {
    let mut matrix: Vec<i32> = (0..6).collect(); // 2 × 3
    let transposed = view(&mut matrix, 0, &[3, 2], &[1, 3]);
    assert!(!transposed.is_contiguous());
    assert_eq!(packed(&transposed), [0, 3, 1, 4, 2, 5]);
    let doubled: Vec<u8> = packed(&transposed).iter().flat_map(|value| (2 * value).to_ne_bytes()).collect();
    transposed.unpack(Bytes::of(&doubled));
    drop(transposed);
    assert_eq!(matrix, [0, 2, 4, 6, 8, 10]);
}

#[test]
fn every_second_element_leaves_those_between_alone() {
    let mut values: Vec<i32> = (0..7).collect();
    let even = view(&mut values, 0, &[4], &[2]);
    assert_eq!(packed(&even), [0, 2, 4, 6]);
    even.unpack(Bytes::of(&[0xff; 16]));
    drop(even);
    assert_eq!(values, [-1, 1, -1, 3, -1, 5, -1]);
}

#[test]
fn steps_may_go_backwards_or_nowhere() {
    let mut values: Vec<i32> = (0..4).collect();
    assert_eq!(packed(&view(&mut values, 3, &[4], &[-1])), [3, 2, 1, 0]);
    assert_eq!(packed(&view(&mut values, 1, &[2, 3], &[0, 1])), [1, 2, 3, 1, 2, 3]);
}

#[test]
fn what_lies_together_is_contiguous_however_it_is_described() {
    let mut values: Vec<i32> = (0..6).collect();
    for (shape, steps) in
        [(&[2, 3][..], &[3, 1][..]), (&[6], &[1]), (&[2, 1, 3], &[3, 77, 1]), (&[0, 3], &[9, 9])]
    {
        assert!(view(&mut values, 0, shape, steps).is_contiguous(), "{shape:?} {steps:?}");
    }
}
