//! Copies of a model that stay equal.

use std::collections::HashSet;
use std::fmt;

use burn_core::module::{Module, ModuleVisitor, Param, ParamId};
use burn_core::tensor::{Element as BurnElement, Tensor, TensorData};
use burn_optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn_optim::{GradientsParams, ModuleOptimizer};
use tenfold::ddp::raw::Framework as _;
use tenfold::ddp::{self, Reducer};
use tenfold::{Element, Group};

use crate::model::{agree, broadcast_model, visit};
use crate::tensors::{read, with_element};
use crate::{Error, Result};

/// Keeps the copies of a model on all ranks equal.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Tensor};
/// use tenfold::Group;
/// use tenfold_burn::DataParallel;
///
/// fn train(group: &Group) -> tenfold_burn::Result<f32> {
///     let device = Device::default().autodiff();
///     let model = LinearConfig::new(1, 1).with_bias(false).init(&device);
///     let (mut parallel, mut model) = DataParallel::new(group, model)?; // every rank has rank 0's weight now
///     let mut optimizer = SgdConfig::new().init();
///     let x = Tensor::<2>::full([4, 1], 1.0 + group.rank() as f32, &device); // this rank's part of the batch
///     for _step in 0..50 {
///         let loss = (model.forward(x.clone()) - x.clone() * 3.0).square().mean(); // the weight should be 3
///         model = parallel.backward_step(&loss, model, &mut optimizer, 0.1)?;
///     }
///     parallel.check_replicas(&model)?;
///     Ok(model.weight.val().into_scalar())
/// }
/// let weights = Group::threads(2, |group| Ok(train(&group).expect("both ranks are alive")))?;
/// assert!(weights[0] == weights[1] && (weights[0] - 3.0).abs() < 0.01);
/// # Ok::<(), tenfold::Error>(())
/// ```
pub struct DataParallel {
    group: Group,
    reducer: Reducer,
    finds_unused: bool,
}

impl DataParallel {
    /// For all parameters of a model that require gradients. Every rank calls it, and gets the model with the values of rank 0.
    ///
    /// # Errors
    /// On all ranks if the models of two ranks differ, a dtype cannot be sent, or no parameter requires gradients. If the group
    /// fails.
    pub fn new<M: Module>(group: &Group, model: M) -> Result<(Self, M)> {
        Self::with_options(group, model, ddp::Options::default())
    }

    /// The same with options of the reducer: the size of buckets, compression, unused parameters.
    ///
    /// # Errors
    /// See [`DataParallel::new`].
    pub fn with_options<M: Module>(group: &Group, model: M, options: ddp::Options) -> Result<(Self, M)> {
        let params = agree(group, trained(&model))?;
        let finds_unused = options.finds_unused_parameters();
        let reducer = Reducer::new(group, &params, options)?; // refuses models that differ
        let model = broadcast_model(group, model, 0)?;
        Ok((DataParallel { group: group.clone(), reducer, finds_unused }, model))
    }

    /// The reducer, for what is not offered here: accumulation by [`Reducer::set_sync`], ranks without data by
    /// [`Reducer::shadow`], statistics.
    pub fn reducer(&mut self) -> &mut Reducer {
        &mut self.reducer
    }

    /// Computes the gradients of this rank's loss, averages them over all ranks, and makes a step with the averages. Every rank
    /// calls it.
    ///
    /// After an error the model is lost, as with burn's own steps. Clone it before if that matters: clones share their memory.
    ///
    /// # Errors
    /// See [`DataParallel::average`].
    ///
    /// # Panics
    /// If `loss` was computed without autodiff.
    pub fn backward_step<const D: usize, M: Module>(
        &mut self,
        loss: &Tensor<D>,
        model: M,
        optimizer: &mut ModuleOptimizer,
        learning_rate: impl Into<ModuleLearningRate>,
    ) -> Result<M> {
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.average(&model, &mut gradients)?;
        Ok(optimizer.step(learning_rate, model, gradients))
    }

    /// Replaces the gradients of this rank's loss by the averages over all ranks. Every rank calls it.
    ///
    /// burn returns all gradients at the end of its backward, so they are reduced then, in buckets. After an error `gradients`
    /// is incomplete.
    ///
    /// # Errors
    /// On all ranks if a parameter has no gradient on a rank and the options do not allow that, or if the model of a rank has
    /// changed. If the group fails.
    pub fn average<M: Module>(&mut self, model: &M, gradients: &mut GradientsParams) -> Result<()> {
        if let Err(error) = self.reduce(model, gradients) {
            // The other ranks wait for buckets of this one. Of its own errors the reducer tells them itself.
            if !matches!(error, Error::Group(_)) {
                self.reducer.group().abort(&format!("rank {} failed: {error}", self.group.rank()));
            }
            return Err(error);
        }
        let mut averages =
            Averages { reducer: &self.reducer, gradients, seen: HashSet::new(), outcome: Ok(()) };
        model.visit(&mut averages);
        averages.outcome
    }

    fn reduce<M: Module>(&mut self, model: &M, gradients: &mut GradientsParams) -> Result<()> {
        if let Some(difference) = difference(self.reducer.params(), &trained(model)?) {
            return Err(Error::Model(difference));
        }
        let mut own = Own { gradients, seen: HashSet::new(), all: Vec::new() };
        model.visit(&mut own);
        let own = own.all.into_iter().collect::<Result<Vec<Option<TensorData>>>>()?;
        if self.finds_unused {
            let unused: Vec<usize> = (0..own.len()).filter(|number| own[*number].is_none()).collect();
            self.reducer.start_backward_without(&unused)?;
        } else {
            self.reducer.start_backward()?; // `finish` names what is missing, on all ranks
        }
        for (number, gradient) in own.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                with_element!(gradient.dtype(), T => hand_over::<T>(&mut self.reducer, number, &gradient))?;
            }
        }
        Ok(self.reducer.finish()?)
    }

    /// Compares the bits of all parameters that require gradients, on all ranks, and returns a fingerprint of them. Every rank
    /// calls it.
    ///
    /// Not compared is what layers keep besides, such as the running averages of a batch normalization: every rank has those of
    /// its own data. [`broadcast_model`] makes them equal.
    ///
    /// # Errors
    /// [`Error::Replicas`] on all ranks if they differ. If burn or the group fails.
    pub fn check_replicas<M: Module>(&self, model: &M) -> Result<u64> {
        let mut print = 0xcbf2_9ce4_8422_2325_u64; // FNV-1a
        let read = visit(model, |found| {
            let data = if found.is_trained { Some((found.data)()?) } else { None };
            for byte in data.iter().flat_map(|data| data.as_bytes()) {
                print = (print ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
            }
            Ok(())
        });
        agree(&self.group, read)?;
        let mut all = vec![0; self.group.size()];
        self.group.all_gather_into(&mut all, &[print])?;
        let others: Vec<usize> = (1..all.len()).filter(|rank| all[*rank] != all[0]).collect();
        if others.is_empty() { Ok(print) } else { Err(Error::Replicas(others)) }
    }
}

/// The parameters that require gradients. One that several fields share counts once, as it has one gradient.
fn trained<M: Module>(model: &M) -> Result<Vec<ddp::Param>> {
    let (mut params, mut seen) = (Vec::new(), HashSet::new());
    visit(model, |found| {
        if found.is_trained && seen.insert(found.id) {
            params.push(found.describe()?);
        }
        Ok(())
    })?;
    if params.is_empty() { Err(Error::Untrained) } else { Ok(params) }
}

/// How a model differs from what it was; names may.
fn difference(before: &[ddp::Param], now: &[ddp::Param]) -> Option<String> {
    if before.len() != now.len() {
        return Some(format!(
            "{} parameters require gradients now, and {} did then",
            now.len(),
            before.len()
        ));
    }
    let differs =
        |(before, now): &(&ddp::Param, &ddp::Param)| (&before.shape, before.dtype) != (&now.shape, now.dtype);
    let (before, now) = before.iter().zip(now).find(differs)?;
    Some(format!(
        "parameter `{}` is {} of {:?} now, and was {} of {:?}",
        now.name, now.dtype, now.shape, before.dtype, before.shape
    ))
}

/// Takes the gradients of this rank out, in the order of [`trained`].
struct Own<'a> {
    gradients: &'a mut GradientsParams,
    seen: HashSet<ParamId>,
    all: Vec<Result<Option<TensorData>>>,
}

impl ModuleVisitor for Own<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.base().is_require_grad() && self.seen.insert(param.id) {
            self.all.push(self.gradients.remove::<D>(param.id).map(read).transpose());
        }
    }
}

/// Puts the averages in, in the same order.
struct Averages<'a> {
    reducer: &'a Reducer,
    gradients: &'a mut GradientsParams,
    seen: HashSet<ParamId>,
    outcome: Result<()>,
}

impl ModuleVisitor for Averages<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let number = self.seen.len();
        if self.outcome.is_err() || !param.base().is_require_grad() || !self.seen.insert(param.id) {
            return;
        }
        if !self.reducer.is_used_anywhere(number) {
            return; // it has no gradient on any rank
        }
        match with_element!(param.base().dtype(), T => average::<T>(self.reducer, number, param.base().dims().to_vec()))
        {
            Ok(data) => {
                let options = (&param.base().device(), param.base().dtype());
                self.gradients.register(param.id, Tensor::<D>::from_data(data, options).inner());
            }
            Err(error) => self.outcome = Err(error),
        }
    }
}

fn hand_over<T: BurnElement + Element>(
    reducer: &mut Reducer,
    number: usize,
    gradient: &TensorData,
) -> Result<()> {
    reducer.gradient_mut::<T>(number)?; // refuses another dtype
    Ok(reducer.grad_ready_from(number, gradient.as_bytes())?) // adds to what was accumulated
}

fn average<T: BurnElement + Element>(
    reducer: &Reducer,
    number: usize,
    shape: Vec<usize>,
) -> Result<TensorData> {
    Ok(TensorData::new(reducer.gradient::<T>(number)?.to_vec(), shape))
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DataParallel({:?}, {:?})", self.group, self.reducer)
    }
}
