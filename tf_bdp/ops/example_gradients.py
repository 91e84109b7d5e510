"""The gradient of every example of a batch, without a pass for each.

In a dense layer an example's gradient is the outer product of the layer's
inputs and the loss's gradient in the layer's outputs, summed over positions
where there are several. One pass backward gives those of all examples; norms,
sums and inner products follow without B gradients (Goodfellow, "Efficient
per-example gradient computations", 2015). A convolution is a dense layer over
the windows that it sees (Rochette et al., "Efficient per-example gradient
computations in convolutional neural networks", 2019).
"""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, Union

import tensorflow as tf

# Examples of the batch with which a model is traced, but never computed: a
# prime, so that no other dimension is mistaken for the examples.
_TRACED_EXAMPLES = 9973
# Windows are cut by a convolution if that takes fewer multiplications for each
# pixel of a window than this; otherwise it is faster to copy the pixels.
_MOST_MULTIPLICATIONS = 256


class ExampleGradients(abc.ABC):
  """The gradients g_x of the losses of single examples x, not added up.

  Attributes:
    losses: The cross-entropy of each example, [B].
    squared_norms: ‖g_x‖² over all trainable variables, [B].
  """

  losses: tf.Tensor
  squared_norms: tf.Tensor

  @abc.abstractmethod
  def weighted_sum(self, weights: tf.Tensor) -> list[tf.Tensor]:
    """Returns Σ w_x g_x, shaped as the model's trainable variables.

    A gradient that is not finite spoils the sum whatever its weight.
    """

  @abc.abstractmethod
  def inner_products(self, direction: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns ⟨g_x, direction⟩ of each example, [B]."""


def of_batch(
  model: tf.keras.Model, features: tf.Tensor, labels: tf.Tensor
) -> ExampleGradients:
  """Returns the gradients of a batch's examples.

  Args:
    model: A built model whose outputs are logits and that treats each example
      by itself, in the order given.
    features: The examples' features, [B, ...].
    labels: The class of each example, [B].
  """
  if slow_layers(model, features):
    return _OneByOne(model, features, labels)
  return _LayerByLayer(model, features, labels)


def slow_layers(
  model: tf.keras.Model, features: Union[tf.Tensor, tf.TensorSpec]
) -> list[str]:
  """Names the layers for which norms take a gradient pass for each example.

  Fast are dense layers and two-dimensional convolutions that are called once,
  whose weights nothing else uses. A single other layer makes `of_batch` slow.

  Args:
    model: A built model.
    features: A batch or its spec; only the shape and the type matter.
  """
  candidates = _recordable_layers(model)
  calls: list[_Call] = []

  def forward(batch: tf.Tensor) -> tf.Tensor:
    with _recorded(candidates, calls.append):
      return model(batch, training=True)

  traced = tf.function(forward, autograph=False).get_concrete_function(
    tf.TensorSpec([_TRACED_EXAMPLES, *features.shape[1:]], features.dtype)
  )
  reads = {
    id(handle): len(captured.consumers())
    for captured, handle in zip(traced.inputs[1:], traced.captured_inputs)
  }
  fast = {
    variable.ref()
    for call in calls
    if call.outputs.graph is traced.graph and call.keeps_examples()
    for variable in call.weights()
    if reads.get(id(variable.handle)) == 1
  }
  slow = [v for v in model.trainable_variables if v.ref() not in fast]
  names = [name for variable in slow for name in _owners(model, variable)]
  return list(dict.fromkeys(names))


class _Call(NamedTuple):
  """A call of a layer, with its outputs before the activation."""

  layer: tf.keras.layers.Layer
  inputs: tf.Tensor
  outputs: tf.Tensor

  def weights(self) -> list[tf.Variable]:
    """Returns the layer's own weights, without those of its activation."""
    layer = self.layer
    return [layer.kernel, layer.bias] if layer.use_bias else [layer.kernel]

  def keeps_examples(self) -> bool:
    """Whether the traced call keeps examples as the first dimension."""
    return (
      isinstance(self.inputs, tf.Tensor)
      and self.outputs.shape[0] == _TRACED_EXAMPLES
      and (self.inputs.shape.rank == 4 or not _is_convolution(self.layer))
    )


def _is_convolution(layer: tf.keras.layers.Layer) -> bool:
  return type(layer) is tf.keras.layers.Conv2D


def _recordable_layers(model: tf.keras.Model) -> list[tf.keras.layers.Layer]:
  """Returns the trainable layers whose gradients are outer products."""
  return [module for module in model.submodules if _is_recordable(module)]


def _is_recordable(module: tf.Module) -> bool:
  # Subclasses, and layers whose call was replaced, may compute anything.
  if _is_convolution(module):
    known = module.groups == 1 and module.data_format == 'channels_last'
  else:
    known = type(module) is tf.keras.layers.Dense
  return (
    known
    and 'call' not in vars(module)
    and module.compute_dtype == module.variable_dtype
    and bool(module.trainable_weights)
  )


def _owners(model: tf.keras.Model, variable: tf.Variable) -> list[str]:
  """Returns the outermost layers that hold a variable; else the model."""
  layers = [
    layer
    for layer in model.submodules
    if isinstance(layer, tf.keras.layers.Layer)
    and not isinstance(layer, tf.keras.Model)
    and any(variable is weight for weight in layer.trainable_weights)
  ]
  inner = {id(part) for layer in layers for part in layer.submodules}
  names = [layer.name for layer in layers if id(layer) not in inner]
  return names or [model.name]


@contextlib.contextmanager
def _recorded(
  layers: Sequence[tf.keras.layers.Layer], record: Callable[[_Call], None]
) -> Iterator[None]:
  """Records every call of the layers, without changing what they compute."""

  def recording_call(layer: tf.keras.layers.Layer) -> Callable[..., tf.Tensor]:
    def call(inputs: tf.Tensor) -> tf.Tensor:
      activation = layer.activation
      with _replaced(layer, 'activation', None):
        outputs = type(layer).call(layer, inputs)
      record(_Call(layer, inputs, outputs))
      return outputs if activation is None else activation(outputs)

    return call

  with contextlib.ExitStack() as stack:
    for layer in layers:
      stack.enter_context(_replaced(layer, 'call', recording_call(layer)))
    yield


@contextlib.contextmanager
def _replaced(
  layer: tf.keras.layers.Layer, name: str, value: Any
) -> Iterator[None]:
  """Replaces an attribute for a while, unnoticed by Keras's bookkeeping."""
  attributes = vars(layer)
  own = {name: attributes[name]} if name in attributes else {}
  attributes[name] = value
  try:
    yield
  finally:
    del attributes[name]
    attributes.update(own)


def _losses(
  model: tf.keras.Model, features: tf.Tensor, labels: tf.Tensor
) -> tf.Tensor:
  return tf.nn.sparse_softmax_cross_entropy_with_logits(
    labels, model(features, training=True)
  )


class _LayerByLayer(ExampleGradients):
  """Gradients from the inputs of all layers and one backward pass."""

  def __init__(
    self, model: tf.keras.Model, features: tf.Tensor, labels: tf.Tensor
  ):
    calls: list[_Call] = []
    # Nothing but the outputs is watched, lest the weights' gradients be
    # computed as well.
    with tf.GradientTape(watch_accessed_variables=False) as tape:

      def record(call: _Call) -> None:
        tape.watch(call.outputs)
        calls.append(call)

      with _recorded(_recordable_layers(model), record):
        self.losses = _losses(model, features, labels)
    gradients = tape.gradient(
      self.losses,
      [call.outputs for call in calls],
      unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    parts: dict[Any, _Part] = {}
    for call, gradient in zip(calls, gradients):
      parts.update(_parts(call, gradient))
    self._shapes = [variable.shape for variable in model.trainable_variables]
    self._parts = [parts[v.ref()] for v in model.trainable_variables]
    self.squared_norms = tf.add_n([p.squared_norms() for p in self._parts])

  def weighted_sum(self, weights: tf.Tensor) -> list[tf.Tensor]:
    return [
      tf.reshape(part.weighted_sum(weights), shape)
      for part, shape in zip(self._parts, self._shapes)
    ]

  def inner_products(self, direction: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(
      [p.inner_products(d) for p, d in zip(self._parts, direction)]
    )


class _OneByOne(ExampleGradients):
  """Gradients by a backward pass for each example, for layers of any kind."""

  def __init__(
    self, model: tf.keras.Model, features: tf.Tensor, labels: tf.Tensor
  ):
    self._variables = model.trainable_variables

    def squared_norm(example: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
      feature, label = example
      with tf.GradientTape() as tape:
        losses = _losses(model, feature[tf.newaxis], label[tf.newaxis])
      gradient = self._gradient(tape, losses, tf.ones_like(losses))
      return tf.add_n([tf.reduce_sum(tf.square(part)) for part in gradient])

    # Persistent, because sums and products may be asked for repeatedly.
    with tf.GradientTape(persistent=True) as self._tape:
      self.losses = _losses(model, features, labels)
    self.squared_norms = tf.map_fn(
      squared_norm,
      (features, labels),
      fn_output_signature=self.losses.dtype,
      parallel_iterations=1,  # Keeps one gradient at a time.
    )

  def _gradient(
    self, tape: tf.GradientTape, losses: tf.Tensor, weights: tf.Tensor
  ) -> list[tf.Tensor]:
    parts = tape.gradient(
      losses,
      self._variables,
      output_gradients=weights,
      unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    return [tf.convert_to_tensor(part) for part in parts]  # Sparse ones too.

  def weighted_sum(self, weights: tf.Tensor) -> list[tf.Tensor]:
    return self._gradient(self._tape, self.losses, weights)

  def inner_products(self, direction: Sequence[tf.Tensor]) -> tf.Tensor:
    # ⟨g_x, v⟩ is the derivative of ⟨Σ w_x g_x, v⟩ in w_x.
    weights = tf.ones_like(self.losses)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(weights)
      parts = self.weighted_sum(weights)
      product = tf.add_n(
        [tf.reduce_sum(p * d) for p, d in zip(parts, direction)]
      )
    return tape.gradient(
      product, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )


class _Part(abc.ABC):
  """The gradients of all examples in one variable."""

  @abc.abstractmethod
  def squared_norms(self) -> tf.Tensor:
    """Returns the squared norm of each."""

  @abc.abstractmethod
  def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
    """Returns the weighted sum, in any shape."""

  @abc.abstractmethod
  def inner_products(self, direction: tf.Tensor) -> tf.Tensor:
    """Returns the inner product of each with a tensor of any shape."""


class _Explicit(_Part):
  """Gradients as they are, [B, weights]."""

  def __init__(self, gradients: tf.Tensor):
    self._gradients = gradients

  def squared_norms(self) -> tf.Tensor:
    return tf.square(_norms(self._gradients))

  def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matvec(self._gradients, weights, transpose_a=True)

  def inner_products(self, direction: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matvec(self._gradients, tf.reshape(direction, [-1]))


class _Factored(_Part):
  """Gradients aᵀd, of inputs a [B, S, K] and output gradients d [B, S, F]."""

  def __init__(self, inputs: tf.Tensor, output_gradients: tf.Tensor):
    self._inputs = inputs
    self._output_gradients = output_gradients

  def squared_norms(self) -> tf.Tensor:
    inputs, gradients = self._inputs, self._output_gradients
    if inputs.shape[1] == 1:
      return tf.square(_norms(inputs) * _norms(gradients))
    # ‖aᵀd‖² = ⟨aaᵀ, ddᵀ⟩, whose terms may all but cancel.
    inputs, gradients = (
      tf.cast(factor, tf.float64) for factor in (inputs, gradients)
    )
    squared_norms = tf.reduce_sum(
      tf.matmul(inputs, inputs, transpose_b=True)
      * tf.matmul(gradients, gradients, transpose_b=True),
      axis=[1, 2],
    )
    return tf.cast(tf.maximum(squared_norms, 0.0), self._inputs.dtype)

  def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
    weighted = self._output_gradients * weights[:, tf.newaxis, tf.newaxis]
    return tf.matmul(_rows(self._inputs), _rows(weighted), transpose_a=True)

  def inner_products(self, direction: tf.Tensor) -> tf.Tensor:
    # ⟨aᵀd, V⟩ = ⟨aV, d⟩
    shape = [self._inputs.shape[-1], self._output_gradients.shape[-1]]
    moved = tf.matmul(_rows(self._inputs), tf.reshape(direction, shape))
    moved = tf.reshape(moved, tf.shape(self._output_gradients))
    return tf.reduce_sum(moved * self._output_gradients, axis=[1, 2])


def _norms(tensor: tf.Tensor) -> tf.Tensor:
  # Twice as fast as with the squares, which are written to memory first.
  axes = list(range(1, tensor.shape.rank))
  return tf.math.reduce_euclidean_norm(tensor, axes)


def _rows(tensor: tf.Tensor) -> tf.Tensor:
  return tf.reshape(tensor, [-1, tensor.shape[-1]])


def _parts(call: _Call, gradient: tf.Tensor) -> dict[Any, _Part]:
  """Returns the gradients in a layer's weights.

  Args:
    call: The call of the layer.
    gradient: The gradient of the losses in the call's outputs.
  """
  layer = call.layer
  # Not before they are needed: windows take much memory.
  with tf.control_dependencies([gradient]):
    inputs = _windows(call) if _is_convolution(layer) else call.inputs
  positions = call.outputs.shape[1:-1].num_elements()
  if positions is None:
    positions = tf.reduce_prod(tf.shape(call.outputs)[1:-1])
  examples = tf.shape(gradient)[0]
  fan_in, fan_out = inputs.shape[-1], gradient.shape[-1]
  inputs = tf.reshape(inputs, [examples, positions, fan_in])
  inputs = tf.cast(inputs, gradient.dtype)
  gradient = tf.reshape(gradient, [examples, positions, fan_out])

  kernel: _Part
  # Sums and products are cheaper without factors, which may be much smaller.
  if (
    isinstance(positions, int)
    and 2 * positions * (fan_in + fan_out) < fan_in * fan_out
  ):
    kernel = _Factored(inputs, gradient)
  else:
    products = tf.matmul(inputs, gradient, transpose_a=True)
    kernel = _Explicit(tf.reshape(products, [examples, fan_in * fan_out]))
  parts = {layer.kernel.ref(): kernel}
  if layer.use_bias:
    parts[layer.bias.ref()] = _Explicit(tf.reduce_sum(gradient, axis=1))
  return parts


def _windows(call: _Call) -> tf.Tensor:
  """Returns what a convolution sees at every position, [B, ..., K]."""
  layer, inputs = call.layer, call.inputs
  if layer.kernel_size == (1, 1):
    rows, columns = layer.strides
    return inputs[:, ::rows, ::columns]
  channels = inputs.shape[-1]
  size = layer.kernel_size[0] * layer.kernel_size[1] * channels
  if size * channels < _MOST_MULTIPLICATIONS:
    identity = tf.eye(size, dtype=inputs.dtype)
    kernel = tf.reshape(identity, [*layer.kernel_size, channels, size])
    return layer.convolution_op(inputs, kernel)
  # Gathers the pixels of each window; the first is a zero outside of the image.
  shape = tf.shape(inputs)
  height, width = shape[1], shape[2]
  outside = 1 if layer.padding == 'same' else 0
  places = tf.range(outside, height * width + outside)
  places = tf.image.extract_patches(
    tf.reshape(places, [1, height, width, 1]),
    sizes=[1, *layer.kernel_size, 1],
    strides=[1, *layer.strides, 1],
    rates=[1, *layer.dilation_rate, 1],
    padding=layer.padding.upper(),
  )
  pixels = tf.reshape(inputs, [shape[0], height * width, channels])
  if outside:
    pixels = tf.pad(pixels, [[0, 0], [outside, 0], [0, 0]])
  windows = tf.gather(pixels, tf.reshape(places, [-1]), axis=1)
  return tf.reshape(windows, [*tf.unstack(tf.shape(call.outputs)[:3]), size])
