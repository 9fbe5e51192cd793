"""Import of other layouts of images and masks (paired folders, COCO, nnU-Net, YOLO, LabelMe, DICOM) into our own."""
