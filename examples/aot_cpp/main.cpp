// Trains a packaged program (Program.package) with libtorch alone: train STEP.pt2 STATE.safetensors STEPS

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>

// A safetensors file: the length of a JSON header, the header, the bytes of the tensors.
std::map<std::string, at::Tensor> read_state(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  std::string header = bytes.substr(8, length);
  std::map<std::string, at::ScalarType> types{{"F32", at::kFloat}, {"F64", at::kDouble}, {"I64", at::kLong}, {"U32", at::kUInt32}};
  std::regex entry(R"rx("([^"]+)":\{"dtype":"(\w+)","shape":\[([\d,]*)\],"data_offsets":\[(\d+),)rx");
  std::map<std::string, at::Tensor> state;
  for (std::sregex_iterator found(header.begin(), header.end(), entry), end; found != end; ++found) {
    std::vector<int64_t> shape;
    std::istringstream extents((*found)[3]);
    for (std::string extent; std::getline(extents, extent, ',');) shape.push_back(std::stoll(extent));
    char* data = bytes.data() + 8 + length + std::stoull((*found)[4]);
    state[(*found)[1]] = at::from_blob(data, shape, types.at((*found)[2])).clone();
  }
  return state;
}

std::vector<std::string> lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> found;
  for (std::string line; std::getline(stream, line);) found.push_back(line);
  return found;
}

int main(int, char** arguments) {
  torch::inductor::AOTIModelPackageLoader step(arguments[1]);
  auto metadata = step.get_metadata();
  auto names = lines(metadata["burnish.inputs"]), outputs = lines(metadata["burnish.outputs"]);
  auto updates = lines(metadata["burnish.updates"]);
  auto values = read_state(arguments[2]);
  // A made-up batch, the same in every step: 16 images with labels, and the learning rate.
  values["x"] = at::sin(at::arange(16 * 64, at::kFloat) * 0.7).reshape({16, 1, 8, 8});
  values["labels"] = at::arange(16, at::kLong) % 10;
  values["lr"] = at::scalar_tensor(0.1, at::kFloat);
  std::vector<at::Tensor> inputs;
  for (auto& name : names) inputs.push_back(values.at(name));
  for (int number = 0; number < std::stoi(arguments[3]); ++number) {
    auto results = step.run(inputs);
    for (size_t i = 0; i < results.size(); ++i) {
      if (updates[i] != "-1") inputs[std::stoi(updates[i])] = results[i];
      if (outputs[i] == "loss") std::cout << "step " << number << " loss " << results[i].item<double>() << std::endl;
    }
  }
}
