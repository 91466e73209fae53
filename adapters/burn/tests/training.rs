//! Ranks as threads: what models are after steps of all of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, Relu};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::quantization::{QuantScheme, QuantStore};
use burn::tensor::{Device, Int, Tensor, TensorData};
use tenfold::{Group, ddp};
use tenfold_burn::{DataParallel, Error, broadcast_model};

fn ranks<R: Send>(size: usize, body: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    Group::threads(size, |group| Ok(body(&group))).unwrap()
}

fn device() -> Device {
    Device::default().autodiff()
}

fn values<const D: usize>(tensor: &Param<Tensor<D>>) -> Vec<f32> {
    tensor.val().to_data().try_to_vec().unwrap()
}

#[derive(Module, Debug)]
struct Network {
    hidden: Linear,
    relu: Relu,
    output: Linear,
}

impl Network {
    fn new() -> Self {
        let hidden = LinearConfig::new(3, 16).init(&device());
        Network { hidden, relu: Relu::new(), output: LinearConfig::new(16, 2).init(&device()) }
    }

    /// Fixed values instead of random ones, for runs that are compared.
    fn fixed() -> Self {
        let wave = |shape: [usize; 2], step: f32| {
            let all = (0..shape[0] * shape[1]).map(|number| (number as f32 * step).sin() / 2.0).collect();
            Param::from_tensor(Tensor::from_data(TensorData::new::<f32, _>(all, shape), &device()))
        };
        let mut network = Network::new();
        (network.hidden.weight, network.output.weight) = (wave([3, 16], 0.7), wave([16, 2], 1.3));
        network.hidden.bias = Some(Param::from_tensor(Tensor::full([16], 0.1, &device())));
        network.output.bias = Some(Param::from_tensor(Tensor::zeros([2], &device())));
        network
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.output.forward(self.relu.forward(self.hidden.forward(x)))
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let wanted = x.clone().slice([0..x.dims()[0], 0..2]).square();
        (self.forward(x) - wanted).square().mean()
    }

    fn all_values(&self) -> Vec<f32> {
        let biases = [&self.hidden.bias, &self.output.bias].map(|bias| values(bias.as_ref().unwrap()));
        [values(&self.hidden.weight), values(&self.output.weight), biases.concat()].concat()
    }
}

/// The rows of this rank in a batch of eight that depends on the step.
fn part(group: &Group, step: usize) -> Tensor<2> {
    let all = (0..24).map(|number| ((number + 24 * step) as f32 * 0.37).cos()).collect();
    let batch = Tensor::<2>::from_data(TensorData::new::<f32, _>(all, [8, 3]), &device());
    let rows = 8 / group.size();
    batch.slice([group.rank() * rows..(group.rank() + 1) * rows, 0..3])
}

#[test]
fn ranks_with_parts_of_a_batch_train_as_one_rank_with_the_whole() {
    let train = |group: &Group| {
        let start = if group.rank() == 0 { Network::fixed() } else { Network::new() }; // rank 0's values count
        let (mut parallel, mut model) = DataParallel::new(group, start).unwrap();
        let mut optimizer = AdamConfig::new().init();
        for step in 0..20 {
            let loss = model.loss(part(group, step));
            model = parallel.backward_step(&loss, model, &mut optimizer, 0.01).unwrap();
        }
        (model.all_values(), parallel.check_replicas(&model).unwrap())
    };
    let (alone, _) = ranks(1, train).remove(0);
    let before = Network::fixed().all_values();
    assert!(alone.iter().zip(&before).any(|(after, before)| (after - before).abs() > 0.1), "it has learned");
    for size in [2, 4] {
        let all = ranks(size, train);
        assert!(all.iter().all(|one| *one == all[0]), "all ranks have the same bits");
        for (one, other) in alone.iter().zip(&all[0].0) {
            assert!((one - other).abs() < 1e-4, "{one} on one rank, {other} on {size}");
        }
    }
}

#[test]
fn gradients_are_the_averages_of_all_ranks() {
    ranks(4, |group| {
        let model = Param::from_tensor(Tensor::<1>::ones([2], &device()));
        let (mut parallel, model) = DataParallel::new(group, model).unwrap();
        let own = Tensor::<1>::from_data([group.rank() as f32, 1.0], &device());
        let loss = (model.val() * own).sum();
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        parallel.average(&model, &mut gradients).unwrap();
        let average = gradients.get::<1>(model.id).unwrap();
        assert!(!average.is_autodiff());
        assert_eq!(average.to_data().try_to_vec::<f32>().unwrap(), [1.5, 1.0]);
    });
}

#[test]
fn small_buckets_and_compression_are_options() {
    for options in [(|| ddp::Options::default().bucket_bytes(&[16])) as fn() -> ddp::Options, || {
        ddp::Options::default().hook(ddp::hooks::Compress::bf16())
    }] {
        let prints = ranks(2, |group| {
            let (mut parallel, mut model) =
                DataParallel::with_options(group, Network::new(), options()).unwrap();
            let mut optimizer = SgdConfig::new().init();
            for step in 0..4 {
                let loss = model.loss(part(group, step));
                model = parallel.backward_step(&loss, model, &mut optimizer, 0.1).unwrap();
            }
            parallel.check_replicas(&model).unwrap()
        });
        assert_eq!(prints[0], prints[1]);
    }
}

#[test]
fn gradients_of_iterations_without_synchronisation_are_added() {
    ranks(2, |group| {
        let model = Param::from_tensor(Tensor::<1>::ones([1], &device()));
        let (mut parallel, model) = DataParallel::new(group, model).unwrap();
        let mut average = |factor: f32, sync: bool| {
            let loss = (model.val() * (factor * (1.0 + group.rank() as f32))).sum();
            let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
            parallel.reducer().set_sync(sync);
            parallel.average(&model, &mut gradients).unwrap();
            gradients.get::<1>(model.id).unwrap().into_scalar::<f32>()
        };
        average(1.0, false);
        assert_eq!(average(10.0, true), 16.5);
        assert_eq!(average(100.0, true), 150.0); // nothing is left of the earlier ones
    });
}

#[derive(Module, Debug)]
struct Mixed {
    table: Param<Tensor<1, Int>>,
    frozen: Param<Tensor<2>>,
    trained: Param<Tensor<1>>,
}

impl Mixed {
    fn new(rank: usize) -> Self {
        let number = rank as f32;
        Mixed {
            table: Param::initialized(Default::default(), Tensor::from_data([rank as i64, 7], &device())),
            frozen: Param::from_tensor(Tensor::full([2, 2], number, &device())).set_require_grad(false),
            trained: Param::from_tensor(Tensor::full([3], number, &device())),
        }
    }
}

#[test]
fn every_value_of_a_model_is_broadcast_and_keeps_what_it_is() {
    ranks(3, |group| {
        let model = broadcast_model(group, Mixed::new(group.rank()), 2).unwrap();
        assert_eq!(values(&model.trained), [2.0; 3]);
        assert_eq!(values(&model.frozen), [2.0; 4]);
        assert_eq!(model.table.val().to_data().try_to_vec_as::<i64>().unwrap(), [2, 7]);
        assert!(model.trained.is_require_grad() && model.trained.val().is_autodiff());
        assert!(!model.frozen.is_require_grad());
    });
}

/// What a batch normalization has seen on each rank, before or after a broadcast by rank 1.
fn running_averages(is_broadcast: bool) -> Vec<Vec<f32>> {
    ranks(2, |group| {
        let model: BatchNorm = BatchNormConfig::new(2).init(&device());
        let (mut parallel, mut model) = DataParallel::new(group, model).unwrap();
        for step in 0..3 {
            let x = part(group, step).slice([0..4, 0..2]) + group.rank() as f32;
            let loss = model.forward(x).square().sum();
            model = parallel.backward_step(&loss, model, &mut SgdConfig::new().init(), 0.1).unwrap();
        }
        parallel.check_replicas(&model).unwrap();
        if is_broadcast {
            model = broadcast_model(group, model, 1).unwrap();
        }
        model.running_mean.value_sync().to_data().try_to_vec().unwrap()
    })
}

#[test]
fn running_averages_are_broadcast_with_their_latest_update() {
    let own = running_averages(false);
    assert_ne!(own[0], own[1]);
    assert_eq!(running_averages(true), [own[1].clone(), own[1].clone()]);
}

#[test]
fn a_replica_that_differs_in_one_bit_is_named_on_all_ranks() {
    let verdicts = ranks(4, |group| {
        let (parallel, mut model) = DataParallel::new(group, Network::new()).unwrap();
        parallel.check_replicas(&model).unwrap();
        if group.rank() == 2 {
            model.output.bias = model.output.bias.map(|bias| {
                bias.map(|bias| {
                    let mut data = bias.to_data();
                    let last = &mut data.as_mut_slice::<f32>().unwrap()[1];
                    *last = last.next_up();
                    Tensor::from_data(data, &device()).require_grad()
                })
            });
        }
        parallel.check_replicas(&model).unwrap_err().to_string()
    });
    assert_eq!(verdicts, vec!["ranks [2] have other parameters than rank 0"; 4]);
}

#[test]
fn models_that_differ_are_refused_on_all_ranks() {
    let refusals = ranks(2, |group| {
        let model = LinearConfig::new(2 + group.rank(), 1).init(&device());
        DataParallel::new(group, model).map(drop).unwrap_err().to_string()
    });
    assert!(refusals.iter().all(|refusal| refusal.contains("`weight`")), "{refusals:?}");
    let refusals = ranks(2, |group| {
        let model = LinearConfig::new(2 + group.rank(), 1).init(&Device::default());
        broadcast_model(group, model, 0).map(drop).unwrap_err().to_string()
    });
    assert!(refusals.iter().all(|refusal| refusal.contains("`weight`")), "{refusals:?}");
}

#[derive(Module, Debug)]
struct Branches {
    always: Param<Tensor<1>>,
    sometimes: Param<Tensor<1>>,
}

/// The outcome of a step in which these ranks do not use one of two parameters.
fn step_without(skips: fn(usize) -> bool, options: fn() -> ddp::Options) -> Vec<Result<[f32; 2], String>> {
    ranks(2, |group| {
        let one = || Param::from_tensor(Tensor::<1>::ones([1], &device()));
        let branches = Branches { always: one(), sometimes: one() };
        let (mut parallel, model) = DataParallel::with_options(group, branches, options()).unwrap();
        let mut loss = model.always.val().sum();
        if !skips(group.rank()) {
            loss = loss + model.sometimes.val().sum();
        }
        let model = parallel.backward_step(&loss, model, &mut SgdConfig::new().init(), 0.5);
        let model = model.map_err(|error| error.to_string())?;
        Ok([values(&model.always)[0], values(&model.sometimes)[0]])
    })
}

#[test]
fn a_parameter_without_a_gradient_is_named_on_all_ranks() {
    for outcome in step_without(|rank| rank == 1, ddp::Options::default) {
        let refusal = outcome.unwrap_err();
        assert!(
            refusal.contains("no gradient at the end of iteration 1: `sometimes` on rank 1"),
            "{refusal}"
        );
    }
    for outcome in step_without(|_| true, ddp::Options::default) {
        let refusal = outcome.unwrap_err();
        assert!(
            refusal.contains("no gradient at the end of iteration 1: `sometimes` on all ranks"),
            "{refusal}"
        );
    }
}

#[test]
fn a_parameter_without_a_gradient_needs_an_option() {
    let options = || ddp::Options::default().find_unused_parameters();
    assert_eq!(step_without(|rank| rank == 1, options), [Ok([0.5, 0.75]), Ok([0.5, 0.75])]);
    assert_eq!(step_without(|_| true, options), [Ok([0.5, 1.0]), Ok([0.5, 1.0])]);
}

#[test]
fn a_rank_with_a_dtype_that_cannot_be_sent_stops_all_ranks() {
    let refusals = ranks(3, |group| {
        let scheme = QuantScheme::default().with_store(QuantStore::Native);
        let mut model = LinearConfig::new(4, 4).init(&device());
        if group.rank() == 1 {
            let weight = Tensor::<2>::ones([4, 4], &Device::default()).quantize_dynamic(&scheme);
            model.weight = Param::initialized(Default::default(), weight);
        }
        broadcast_model(group, model, 0).map(drop).unwrap_err().to_string()
    });
    assert_eq!(refusals[0], "ranks [1] could not take part: see their errors");
    assert_eq!(refusals[1], "parameter `weight` of dtype qfloat cannot be sent: cast or dequantize it first");
    assert_eq!(refusals[2], refusals[0]);
}

#[test]
fn a_model_without_autodiff_on_one_rank_stops_all_ranks() {
    let refusals = ranks(2, |group| {
        let place = if group.rank() == 0 { Device::default() } else { device() };
        let model = LinearConfig::new(4, 4).init(&place);
        DataParallel::new(group, model).map(drop).unwrap_err()
    });
    assert!(matches!(refusals[0], Error::Untrained), "{refusals:?}");
    assert!(matches!(&refusals[1], Error::Peers(ranks) if *ranks == [0]), "{refusals:?}");
}

#[test]
fn a_model_that_changes_on_one_rank_fails_the_step_on_all_ranks() {
    let refusals = ranks(2, |group| {
        let (mut parallel, model) = DataParallel::new(group, Network::fixed()).unwrap();
        let loss = model.loss(part(group, 0));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        let model = if group.rank() == 0 { model } else { model.no_grad() };
        parallel.average(&model, &mut gradients).unwrap_err().to_string()
    });
    assert!(refusals[1].starts_with("no parameter of the model requires gradients"), "{refusals:?}");
    assert!(
        refusals[0].contains("rank 1 failed: no parameter of the model requires gradients"),
        "{refusals:?}"
    );
    let refusals = ranks(2, |group| {
        let (mut parallel, mut model) = DataParallel::new(group, Network::fixed()).unwrap();
        let loss = model.loss(part(group, 0));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        if group.rank() == 1 {
            model.output = LinearConfig::new(5, 2).init(&device());
        }
        parallel.average(&model, &mut gradients).unwrap_err().to_string()
    });
    let change = "parameter `output.weight` is float32 of [5, 2] now, and was float32 of [16, 2]";
    assert!(refusals.iter().all(|refusal| refusal.contains(change)), "{refusals:?}");
}
